"""DADT's own executor over TCP, between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.comm.executors import sockets
from dadt.comm.executors.base import Connection, P2PWork, renumbered
from dadt.comm.executors.meet import Meet, attend
from dadt.comm.executors.point_to_point import CoreMessages
from dadt.config import Config
from dadt.errors import CommError
from dadt.world import World

USES = ("data", "notices", "mail")
CLOSE_SECONDS = 5.0


def connect(config: Config, world: World, meet: Meet) -> Connection:
    return _connect(meet, world, range(world.world_size), config)


def _connect(meet: Meet, world: World, ranks: Sequence[int], config: Config) -> Connection:
    own, size = ranks.index(world.rank), len(ranks)
    connecting = partial(sockets.connect, USES, "tcp", meet, world, ranks, config)
    sockets_of = attend(meet, "connecting by TCP", connecting)
    found = {use: [-1 if each is None else each.detach() for each in by_place] for use, by_place in sockets_of.items()}
    executor = _core.TcpExecutor(own, found["data"], found["notices"])
    mail = CoreMessages(_core.TcpMailbox(own, found["mail"]))
    return Connection(_core.Engine(executor, own, size, config.timeout), mail, mail.close)


def join(meet: Meet, world: World, ranks: Sequence[int], config: Config) -> TcpGroup:
    """Connect these ranks of the world, which are renumbered in the given order."""
    return TcpGroup(_connect(meet, world, ranks, config), ranks, config.timeout)


class TcpGroup:
    """A connection over TCP as an Executor, whose collectives block: the part of a hierarchical executor between
    hosts."""

    name = "tcp"

    def __init__(self, connection: Connection, ranks: Sequence[int], timeout: float) -> None:
        self._connection, self._engine, self._mail = connection, connection.engine, connection.mail
        self._ranks = ranks
        self._timeout = 2 * timeout
        """Seconds of waiting: twice the timeout, as the operation itself fails after one timeout."""

    def allreduce(self, flat: torch.Tensor, reduction: str) -> None:
        kind = getattr(_core.Reduction, reduction)
        address = [flat.data_ptr()]
        self._wait(self._engine.allreduce(_layout(flat), address, address, "allreduce", reduction=kind))

    def allgather(self, mine: torch.Tensor, all: torch.Tensor) -> None:
        self.exchange([mine] * len(self._ranks), all.view(len(self._ranks), len(mine)).unbind())

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        self._wait(self._engine.broadcast(_layout(flat), [flat.data_ptr()], root, "broadcast"))

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        self._wait(self._engine.exchange(_pieces(sends), _pieces(receives), "exchange"))

    def _wait(self, work: _core.Work) -> None:
        try:
            work.wait(self._timeout)
        except CommError as error:
            raise type(error)(renumbered(str(error), self._ranks)) from error

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> P2PWork:
        return self._mail.send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int = 0) -> P2PWork:
        return self._mail.receive(tensor, peer, tag)

    def abort(self) -> None:
        self._connection.abort("a rank has given up", lost=False)

    def close(self) -> bool:
        self._engine.close(CLOSE_SECONDS)
        return self._connection.close()


def _layout(flat: torch.Tensor) -> _core.Layout:
    return _core.Layout(DTYPES[flat.dtype], [flat.numel()])


def _pieces(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
