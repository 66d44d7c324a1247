"""The hosts of a job, as users and schedulers name them; their slots, which are places for workers; and simulated
hosts."""
