"""Whether training under DADT ends where training without it does: `python -m benchmarks.convergence --help`."""
