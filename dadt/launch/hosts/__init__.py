"""Hosts and slots as users and schedulers name them, and simulated hosts."""
