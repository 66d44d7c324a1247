"""`python -m dadt_cli` is `dadt`."""

from dadt_cli import main

main()
