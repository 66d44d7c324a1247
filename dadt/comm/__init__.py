"""Moves tensors and bytes between ranks: executors, collectives, compression, rendezvous and traces. Contains nothing
about training itself."""
