"""Handles the loss of ranks: the remaining ranks connect again, compare how far each of them has trained, and train
on."""
