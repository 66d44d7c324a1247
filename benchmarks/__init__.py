"""Measurements that take hours: run from the root of the repository, `python -m benchmarks.<name>`."""
