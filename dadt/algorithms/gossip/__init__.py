"""Gossip: each rank averages weights with a neighbour."""
