"""The subjects of `dadt check-env` on one host. Each subject is one file and one line here.

Its `checks(asked)` yields one Check after the other. It runs in a process of its own, so it may hang or crash: then
what it has yielded counts, and a failed check says how it ended.
"""

SUBJECTS = {
    "python": 15.0,
    "core": 30.0,
    "torch": 60.0,
    "cuda": 60.0,
    "mpi": 45.0,
    "rdma": 5.0,
    "network": 15.0,
    "machine": 15.0,
    "limits": 15.0,
    "variables": 15.0,
    "leftovers": 15.0,
    "scheduler": 60.0,
    "tools": 15.0,
    "training": 120.0,
}
"""Modules of this package, in the order in which they are shown, and the seconds that each may take."""
