"""Ranks that are lost: the remaining ranks connect again, compare how far each of them is, and train on."""
