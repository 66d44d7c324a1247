"""The subjects that `dadt check-env` checks on one host. Each subject is a module in this folder and an entry in
SUBJECTS. The module's function `checks(asked)` yields Check objects. A subject runs in a process of its own, so it may
hang or crash: checks that it has yielded before are kept, and a failed check says how the process ended.
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
"""Names of this package's modules, in the order in which their checks are shown, and the time limit of each in seconds.
"""
