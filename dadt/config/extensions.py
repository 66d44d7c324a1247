"""The algorithms, executors and launchers that have a name. A new one is a file and a line here (CONTRIBUTING.md).

Modules are given by name, since this layer must not import torch.
"""

from __future__ import annotations

ALGORITHMS = {
    "pipe": "dadt.algorithms.pipe.pipe:Pipe",
    "sync": "dadt.algorithms.sync:Sync",
    "local": "dadt.algorithms.local.local:Local",
    "gossip": "dadt.algorithms.gossip.gossip:Gossip",
    "auto": "dadt.algorithms.auto.auto:Auto",
}
"""Subclasses of dadt.algorithms.Algorithm. Users name their own as <module>:<Class>."""
EXECUTORS = {
    "shm": "dadt.comm.executors.core:shm",
    "null": "dadt.comm.executors.core:null",
    "gloo": "dadt.comm.executors.c10d:gloo",
    "nccl": "dadt.comm.executors.nccl:connect",
    "mpi": "dadt.comm.executors.mpi:connect",
    "mpicuda": "dadt.comm.executors.mpicuda:connect",
}
"""Functions connect(config, world, meet) -> Connection. c10d:<name> and hierarchical:<name> are valid as well."""
LAUNCHERS = {
    "local": "dadt.launch.launchers.nearby:launcher",
    "ssh": "dadt.launch.launchers.nearby:ssh",
    "slurm": "dadt.launch.launchers.slurm:launcher",
    "mpi": "dadt.launch.launchers.mpi:launcher",
    "ray": "dadt.launch.launchers.ray:launcher",
}
"""Functions launcher(request) -> Launcher."""
