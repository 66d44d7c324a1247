"""Entry point of `python -m dadt_cli`, which runs the same program as the command `dadt`."""

from dadt_cli import main

main()
