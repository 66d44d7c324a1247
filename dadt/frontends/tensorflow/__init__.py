"""TensorFlow 2: operations between ranks, a tape, optimizers of Keras."""
