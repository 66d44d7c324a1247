"""Commands that read what a job has recorded: `dadt report` and `dadt timeline`."""
