"""The built-in algorithms, executors and launchers, by name. To add one, write its file and add a line to this module
(see CONTRIBUTING.md).

Modules are named in text instead of imported, because the layer `dadt/config` must not import torch.
"""

from __future__ import annotations

ALGORITHMS = {
    "pipe": "dadt.algorithms.pipe.pipe:Pipe",
    "sync": "dadt.algorithms.sync:Sync",
    "local": "dadt.algorithms.local.local:Local",
    "gossip": "dadt.algorithms.gossip.gossip:Gossip",
    "auto": "dadt.algorithms.auto.auto:Auto",
}
"""Names of algorithms, with their classes (subclasses of dadt.algorithms.Algorithm). Users name classes of their own as
<module>:<Class>."""
EXECUTORS = {
    "shm": "dadt.comm.executors.core:shm",
    "null": "dadt.comm.executors.core:null",
    "tcp": "dadt.comm.executors.tcp:connect",
    "gloo": "dadt.comm.executors.c10d:gloo",
    "nccl": "dadt.comm.executors.nccl:connect",
    "mpi": "dadt.comm.executors.mpi:connect",
    "mpicuda": "dadt.comm.executors.mpicuda:connect",
}
"""Names of executors, with their functions connect(config, world, meet) -> Connection. c10d:<name> and
hierarchical:<name> are valid as well."""
LAUNCHERS = {
    "local": "dadt.launch.launchers.nearby:launcher",
    "ssh": "dadt.launch.launchers.nearby:ssh",
    "slurm": "dadt.launch.launchers.slurm:SlurmLauncher",
    "mpi": "dadt.launch.launchers.mpi:MpiLauncher",
    "ray": "dadt.launch.launchers.ray:RayLauncher",
}
"""Names of launchers, with their functions launcher(request) -> Launcher."""
