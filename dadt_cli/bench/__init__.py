"""`dadt bench`."""
