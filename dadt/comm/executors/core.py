"""Executors that the C++ core provides: shared memory, and one that moves nothing."""

from __future__ import annotations

from functools import partial

from dadt import _core
from dadt.comm.executors.base import Connection
from dadt.comm.executors.meet import Meet, attend
from dadt.comm.executors.point_to_point import CoreMessages, NoPointToPoint
from dadt.config import Config
from dadt.world import World

SHARES = "connecting by shared memory"


def shm(config: Config, world: World, meet: Meet) -> Connection:
    executor = _core.ShmExecutor(world.rank, world.world_size)
    endpoints = meet.exchange("shm endpoint", executor.endpoint())
    attend(meet, SHARES, partial(executor.connect, endpoints, config.start_timeout))
    mail = _shared_mail(config, world, meet)
    return Connection(_core.Engine(executor, world.rank, world.world_size, config.timeout), mail, mail.close)


def null(config: Config, world: World, meet: Meet) -> Connection:
    meet.exchange("null endpoint", b"")  # waits until all ranks have started, as other executors do
    executor = _core.NullExecutor(world.rank, world.world_size)
    engine = _core.Engine(executor, world.rank, world.world_size, config.timeout)
    if world.world_size > 1:
        return Connection(engine, NoPointToPoint(), lambda: True)
    # With a single rank, the null executor's results are correct, and the rank can send messages to itself.
    mail = _shared_mail(config, world, meet)
    return Connection(engine, mail, mail.close)


def _shared_mail(config: Config, world: World, meet: Meet) -> CoreMessages:
    mailbox = _core.Mailbox(world.rank, world.world_size)
    endpoints = meet.exchange("mailbox endpoint", mailbox.endpoint())
    attend(meet, SHARES, partial(mailbox.connect, endpoints, config.start_timeout))
    return CoreMessages(mailbox)
