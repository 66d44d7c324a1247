"""`python -m dadt_cli`: the `dadt` command where its script is not on the PATH."""

from dadt_cli import main

if __name__ == "__main__":
    main()
