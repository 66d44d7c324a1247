"""Moves tensors and bytes between ranks; knows nothing of training."""
