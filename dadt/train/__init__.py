"""Training on one rank: the runtime, its optimizers, gradient exchanges, weight prediction and checkpoints."""
