"""Gossip, an algorithm in which each rank averages its weights with one other rank at a time."""
