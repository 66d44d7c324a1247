"""Commands that show or end jobs, running or finished: ps, logs, stacks, kill."""
