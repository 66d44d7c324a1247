"""Collective operations on tensors: in program order, by name in any order, and within process sets."""
