"""Data-parallel training with Keras's optimizers, on torch or TensorFlow."""
