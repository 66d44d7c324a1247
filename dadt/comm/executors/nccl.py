"""NCCL executor: GPU tensors are averaged where they are, by a process group and a CUDA stream of DADT's own.

Step metadata and weights travel through host memory, over the executor that a job without GPUs would use, which also
checks that all ranks are present.
"""

from __future__ import annotations

import torch

from dadt.comm.executors import base, c10d, connect_one, places
from dadt.comm.executors.base import Connection
from dadt.comm.executors.device import Device
from dadt.comm.executors.meet import Apart, Meet
from dadt.config import Config
from dadt.config.executor import pick_for_host_memory
from dadt.world import World, outlive_peers


def connect(config: Config, world: World, meet: Meet) -> Connection:
    """Connect all ranks: NCCL for GPU tensors, and for host tensors and metadata the executor that a job without GPUs
    would use."""
    c10d.check("nccl")
    name, _ = pick_for_host_memory([place.workers for place in places(world, meet, "nccl host")])
    return beside(connect_one(name, config, world, meet), config, world, meet)


def beside(host: Connection, config: Config, world: World, meet: Meet) -> Connection:
    """Return the connection, extended so that NCCL averages tensors on this rank's GPU."""
    survives = config.min_np > 0
    if survives:
        outlive_peers()
    executor = c10d.join("nccl", Apart(meet, "nccl"), world, range(world.world_size), config)
    gpu = torch.device("cuda", torch.cuda.current_device())
    return base.beside(host, Device(executor, host.engine, gpu, world.rank, world.world_size, survives))
