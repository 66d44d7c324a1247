"""The command `dadt bench`: one module for each benchmark. Contenders that are compared run side by side in one run."""
