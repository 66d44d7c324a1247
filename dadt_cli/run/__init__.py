"""The command `dadt run`, which trains with a script on one or more hosts."""
