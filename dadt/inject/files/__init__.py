"""Coordinates files that several ranks of a host write to the same path: one rank writes the real file, the others
private copies."""
