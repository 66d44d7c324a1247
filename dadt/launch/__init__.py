"""Places workers, starts one agent per host, reads their output, and leaves nothing behind."""
