"""DADT's own executor over TCP, between hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.comm.executors import sockets
from dadt.comm.executors.base import Connection, P2PWork, renumbered
from dadt.comm.executors.meet import Meet, attend
from dadt.comm.executors.point_to_point import CoreMessages
from dadt.comm.link_totals import Links, LinkTotals, by_host
from dadt.config import Config
from dadt.config.link import pace_of
from dadt.control.pacing import pace
from dadt.errors import CommError, PeerLost
from dadt.world import World

USES = (sockets.NOTICES, "mail", sockets.DATA)
"""Uses of the connections, in the order in which they are made and in which the C++ core expects them. Data connections
come last, because the earlier ones show how many of them the link needs."""
CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.05


def connect(config: Config, world: World, meet: Meet) -> Connection:
    return _connect(meet, world, range(world.world_size), config)


def _connect(meet: Meet, world: World, ranks: Sequence[int], config: Config) -> Connection:
    own, size, kept = ranks.index(world.rank), len(ranks), meet.kept
    offered = kept.offered(ranks) if kept is not None else {}
    for link in offered.values():
        link.enter(world.generation)
    connecting = partial(sockets.connect, USES, "tcp", meet, world, ranks, config, kept=offered)
    connected = attend(meet, "connecting by TCP", connecting, sockets.Connected.close)
    silence, rate = sockets.silence_of(config), pace_of(config.link) / max(1, size - 1)
    try:
        _clear(meet, {ranks[place]: link for place, link in connected.kept.items()}, world.generation, silence)
    except BaseException:
        connected.close()
        raise
    found = [[each.detach() for use in USES for each in connected.sockets[use][place]] for place in range(size)]
    for place in connected.kept:
        assert kept is not None
        found[place] = kept.take(ranks[place])
        for descriptor in found[place] if rate else ():
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                pace(copy, rate)
    executor = _core.TcpExecutor(own, found, silence)
    if connected.mender is not None:
        connected.mender.start(executor, [len(those) for those in found], silence, rate)
    mailbox = _core.TcpMailbox(executor)
    mail, links = CoreMessages(mailbox), by_host([executor, mailbox], _stands(connected.addresses, own, ranks))

    if config.verbose and own == 0:
        links = _telling_groups(links, executor, size, meet.say)

    def close() -> bool:
        ended = mail.close()
        standing = executor.release()
        if kept is not None:
            kept.fill(ranks, standing)
        return ended

    return Connection(_core.Engine(executor, own, size, config.timeout), mail, close, links=links)


def _telling_groups(links: Links, executor: _core.TcpExecutor, size: int, say: Callable[[str], None]) -> Links:
    """Return `links` as a function that also tells the user when averages begin to go in other groups of ranks."""
    told = size

    def read() -> Mapping[int, LinkTotals]:
        nonlocal told
        if (group := executor.group) != told:
            told = group
            way = f"in groups of {group} ranks: what lies between the groups is slower than the ranks' own links"
            say(f"averages of 1 MiB and more go {way if group < size else 'in one group of all ranks again'}")
        return links()

    return read


def _clear(meet: Meet, links: Mapping[int, _core.KeptLink], generation: int, seconds: float) -> None:
    """Wait until nothing of the group that has failed is left in its connections, which are given by rank. Those for
    which this takes longer are ended, and will be replaced as all that break. Raises PeerLost if ranks are lost
    meanwhile."""
    deadline = monotonic() + seconds
    for rank, link in links.items():
        while not link.clear(generation, _LOOK_SECONDS):
            if meet.outdated:
                raise PeerLost("ranks have ended")
            if monotonic() >= deadline:
                meet.say(f"rank {rank} has not said where its bytes end: its connections are made anew")
                link.end()


def _stands(addresses: Sequence[str], own: int, ranks: Sequence[int]) -> list[int | None]:
    """Return, for each rank of the group, the first rank on the same host, or None if it is on this rank's host.
    addresses: where each rank listens. own: this rank's index in the group."""
    first = dict(zip(reversed(addresses), reversed(ranks), strict=True))
    return [None if address == addresses[own] else first[address] for address in addresses]


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
        """Seconds to wait for an operation: twice the timeout, because the operation itself fails after the timeout."""

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

    def links(self) -> Mapping[int, LinkTotals]:
        return self._connection.links()

    def abort(self) -> None:
        self._connection.abort("a rank has given up", lost=False)

    def close(self) -> bool:
        self._engine.close(CLOSE_SECONDS)
        return self._connection.close()


def _layout(flat: torch.Tensor) -> _core.Layout:
    return _core.Layout(DTYPES[flat.dtype], [flat.numel()])


def _pieces(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
