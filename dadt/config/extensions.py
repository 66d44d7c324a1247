"""What can be chosen by name, and where it is: adding one is a file and a line here (CONTRIBUTING.md).

Names of modules only, as nothing of this layer imports torch.
"""

from __future__ import annotations

ALGORITHMS = {
    "pipe": "dadt.algorithms.pipe.pipe:Pipe",
    "sync": "dadt.algorithms.sync:Sync",
    "local": "dadt.algorithms.local.local:Local",
    "gossip": "dadt.algorithms.gossip.gossip:Gossip",
    "auto": "dadt.algorithms.auto:Auto",
}
"""Subclasses of dadt.algorithms.Algorithm. A user's own is named <module>:<Class>."""
EXECUTORS = {
    "shm": "dadt.comm.executors.core:shm",
    "null": "dadt.comm.executors.core:null",
    "gloo": "dadt.comm.executors.c10d:gloo",
    "nccl": "dadt.comm.executors.nccl:connect",
    "mpi": "dadt.comm.executors.mpi:connect",
    "mpicuda": "dadt.comm.executors.mpicuda:connect",
}
"""connect(config, world, meet) -> Connection. Beside them there are c10d:<name> and hierarchical:<name>."""
LAUNCHERS = {
    "local": "dadt.launch.launchers.nearby:launcher",
    "ssh": "dadt.launch.launchers.nearby:ssh",
    "slurm": "dadt.launch.launchers.slurm:launcher",
    "mpi": "dadt.launch.launchers.mpi:launcher",
}
"""launcher(request) -> Launcher."""
