"""Entry point of `python -m dadt_cli`, which is the same as the command `dadt`."""

from dadt_cli import main

main()
