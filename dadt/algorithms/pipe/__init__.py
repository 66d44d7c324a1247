"""Pipe-SGD: gradients are applied one step late."""
