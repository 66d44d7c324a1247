"""TensorFlow 2: operations between ranks, a tape that averages gradients, and weight prediction."""
