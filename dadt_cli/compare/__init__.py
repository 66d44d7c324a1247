"""`dadt compare`."""
