"""`dadt run`."""
