"""Parts that are common to Horovod's APIs for torch, Keras and TensorFlow."""
