"""Hosts and slots as users and schedulers name them; simulated hosts."""
