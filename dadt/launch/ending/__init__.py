"""How a job comes to its end, and why."""
