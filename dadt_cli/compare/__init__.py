"""The command `dadt compare`, which compares the weights in two files."""
