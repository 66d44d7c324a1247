"""Keras on torch: its optimizers train data-parallel, as torch's do."""
