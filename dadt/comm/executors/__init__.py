"""What moves the bytes between ranks. Each executor is a row of EXECUTORS: the core's own, or one file here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed

from dadt import _core
from dadt.comm.executors import c10d, hierarchical, mpi, mpicuda, nccl
from dadt.comm.executors.base import Connection, together
from dadt.comm.executors.mail import NoMail, SharedMail
from dadt.comm.executors.meet import Apart, Meet
from dadt.config import Config
from dadt.config.executor import Place, choose, executors_of, pick_for_host_memory
from dadt.world import World

Connect = Callable[[Config, World, Meet], Connection]


def _shm(config: Config, world: World, meet: Meet) -> Connection:
    executor = _core.ShmExecutor(world.rank, world.world_size)
    executor.connect(meet.exchange("shm endpoint", executor.endpoint()), config.start_timeout)
    mail = _shared_mail(config, world, meet)
    return Connection(_core.Engine(executor, world.rank, world.world_size, config.timeout), mail, mail.close)


def _null(config: Config, world: World, meet: Meet) -> Connection:
    meet.exchange("null endpoint", b"")  # it starts as others do, with everybody there
    executor = _core.NullExecutor(world.rank, world.world_size)
    engine = _core.Engine(executor, world.rank, world.world_size, config.timeout)
    if world.world_size > 1:
        return Connection(engine, NoMail(), lambda: None)
    mail = _shared_mail(config, world, meet)  # its own values are what one rank gets, and its own messages
    return Connection(engine, mail, mail.close)


def _shared_mail(config: Config, world: World, meet: Meet) -> SharedMail:
    mailbox = _core.Mailbox(world.rank, world.world_size)
    mailbox.connect(meet.exchange("mailbox endpoint", mailbox.endpoint()), config.start_timeout)
    return SharedMail(mailbox)


def _nccl(config: Config, world: World, meet: Meet) -> Connection:
    """Tensors of the host, and what goes beside those of GPUs, take the way that they take in a job without GPUs."""
    c10d.check("nccl")
    name, _ = pick_for_host_memory([place.workers for place in _places(world, meet, "nccl host")])
    return nccl.beside(_connect(name, config, world, meet), config, world, meet)


EXECUTORS: dict[str, Connect] = {
    "shm": _shm,
    "null": _null,
    "gloo": partial(c10d.connect, "gloo"),
    "nccl": _nccl,
    "mpi": mpi.connect,
    "mpicuda": mpicuda.connect,
}
FAMILIES: dict[str, Callable[[str, Config, World, Meet], Connection]] = {
    "c10d": c10d.connect,
    "hierarchical": hierarchical.connect,
}
"""Those that are named with a member, as c10d:ucc."""


def connect(config: Config, world: World, meet: Meet) -> Connection:
    """Engines over the configured executors, connected to all peers.

    Raises ConfigError where an executor is not usable here, StartTimeout where peers do not come, CommError where they
    cannot be reached.
    """
    if "auto" in executors_of(config):
        config, _ = choose(config, _places(world, meet, "host"))
    broadcast, allreduce = executors_of(config)
    if broadcast == allreduce:
        return _connect(allreduce, config, world, meet)
    rest = _connect(allreduce, config, world, meet)
    try:
        own = _connect(broadcast, config, world, Apart(meet, "broadcast"))
    except BaseException as error:
        rest.abandon(f"the executor for broadcasts did not start: {error}")
        raise
    return together(rest, own, config.timeout)


def _connect(name: str, config: Config, world: World, meet: Meet) -> Connection:
    family, _, member = name.partition(":")
    if name in EXECUTORS:
        return EXECUTORS[name](config, world, meet)
    return FAMILIES[family](member, config, world, meet)


def _places(world: World, meet: Meet, key: str) -> list[Place]:
    """What each host has, as its ranks see it."""
    gpus = torch.cuda.device_count() if distributed.is_nccl_available() else 0
    told = [list(map(int, blob.split())) for blob in meet.exchange(key, f"{world.cross_rank} {gpus}".encode())]
    return [
        Place(f"host {host}", sum(each[0] == host for each in told), min(each[1] for each in told if each[0] == host))
        for host in sorted({host for host, _ in told})
    ]
