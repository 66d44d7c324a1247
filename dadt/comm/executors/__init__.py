"""Executors, which move the bytes between ranks. Each one is a file in this folder, and a line in
dadt/config/extensions.py."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import distributed

from dadt.comm.executors.base import Connection, together
from dadt.comm.executors.meet import Apart, Meet
from dadt.config import Config
from dadt.config.executor import HostWorkers, choose, executors_of
from dadt.config.extensions import EXECUTORS
from dadt.world import World

FAMILIES = {"c10d": "dadt.comm.executors.c10d:connect", "hierarchical": "dadt.comm.executors.hierarchical:connect"}
"""Executors that need a second name after a colon, as in c10d:ucc, each with the function that connects it
("module:function")."""


def connect(config: Config, world: World, meet: Meet) -> Connection:
    """Connect this rank to all peers, with C++ engines that use the configured executors.

    Raises ConfigError if an executor is not usable on this host, StartTimeout if peers do not join in time, and
    CommError if they cannot be reached.
    """
    if "auto" in executors_of(config):
        config, _ = choose(config, places(world, meet, "host"))
    broadcast, allreduce = executors_of(config)
    if broadcast == allreduce:
        return connect_one(allreduce, config, world, meet)
    rest = connect_one(allreduce, config, world, meet)
    try:
        own = connect_one(broadcast, config, world, Apart(meet, "broadcast"))
    except BaseException as error:
        rest.abandon(f"the executor for broadcasts did not start: {error}")
        raise
    return together(rest, own, config.timeout)


def connect_one(name: str, config: Config, world: World, meet: Meet) -> Connection:
    """Connect the executor of this name, which then serves all operations of the connection."""
    family, _, member = name.partition(":")
    module, _, function = (EXECUTORS.get(name) or FAMILIES[family]).partition(":")
    given = (config, world, meet) if name in EXECUTORS else (member, config, world, meet)
    connection: Connection = getattr(import_module(module), function)(*given)
    return connection


def places(world: World, meet: Meet, key: str) -> list[HostWorkers]:
    """Return the number of ranks and GPUs of each host, as reported by its ranks. key: unique key of this exchange
    between ranks."""
    gpus = torch.cuda.device_count() if distributed.is_nccl_available() else 0
    told = [list(map(int, blob.split())) for blob in meet.exchange(key, f"{world.cross_rank} {gpus}".encode())]
    by_host = {host: [gpus for there, gpus in told if there == host] for host in sorted({host for host, _ in told})}
    return [HostWorkers(f"host {host}", len(each), min(each)) for host, each in by_host.items()]
