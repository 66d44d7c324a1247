"""Pipe-SGD, in which gradients are applied one step late."""
