"""One rank's training: the runtime, its optimizers, checkpoints."""
