"""Measures whether training under DADT reaches the same accuracy as training without it: `python -m
benchmarks.convergence --help`."""
