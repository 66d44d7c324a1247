"""Messages between two ranks in a simulated world, in order, and collective operations of a few values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from dadt.errors import CommError, CommTimeout, Mismatch, PeerLost
from simulation.comm_strands import Strands, WaitPoint

CLOSED = "the connection was closed by a peer"
EAGER = 0.3
"""Part of the messages that are sent before their receiver asks for them."""


class SimulatedTransit:
    """A message that is sent or received."""

    def __init__(self, strands: Strands, tensor: torch.Tensor, source: int) -> None:
        self._changed = WaitPoint(strands)
        self.tensor, self.source = tensor, source
        self.done = False
        self.error: CommError | None = None

    def end(self, error: CommError | None = None) -> None:
        if not self.done:
            self.done, self.error = True, error
            self._changed.change()

    def wait(self, timeout: float) -> None:
        if not self._changed.wait(lambda: self.done, timeout):
            raise CommTimeout("the message was not done in time")
        if self.error is not None:
            raise type(self.error)(str(self.error))


class MailGroup:
    """The ranks of one generation, connected with each other."""

    def __init__(
        self, strands: Strands, members: tuple[int, ...], latency: float, reaches: Callable[..., bool]
    ) -> None:
        """reaches: whether messages go from one rank (by its number in the job) to another at this time."""
        self.strands, self.world, self.members = strands, strands.world, members
        self._latency, self._reaches = latency, reaches
        self._last: dict[tuple[int, int], float] = {}
        self._arrived: dict[tuple[int, int, int], deque[tuple[torch.Tensor, SimulatedTransit]]] = {}
        self._asked: dict[tuple[int, int, int], deque[SimulatedTransit]] = {}
        self._open: dict[int, list[tuple[int, SimulatedTransit]]] = {index: [] for index in range(len(members))}
        self.failed: dict[int, CommError] = {}
        self.calls: dict[tuple[int, int], dict[int, bytes]] = {}
        """Collective operations: what each rank has given, by the number of the operation and the size of the group."""
        self._count = [0] * len(members)
        self.changed = WaitPoint(strands)

    def begin(self, rank: int, peer: int, tensor: torch.Tensor) -> SimulatedTransit:
        transit = SimulatedTransit(self.strands, tensor, peer)
        if rank in self.failed:
            transit.end(self.failed[rank])
        else:
            self._open[rank] = [(p, each) for p, each in self._open[rank] if not each.done]
            self._open[rank].append((peer, transit))
        return transit

    def send(self, rank: int, tensor: torch.Tensor, peer: int, tag: int) -> SimulatedTransit:
        transit = self.begin(rank, peer, tensor)
        if not transit.done:
            way = rank, peer
            at = max(self._last.get(way, 0.0), self.world.now + self.world.spread(self._latency))
            self._last[way] = at
            copy = tensor.clone()
            if self.world.random.random() < EAGER:
                self.world.after(self._latency / 10, transit.end)
            self._carry(at, rank, peer, tag, copy, transit)
        return transit

    def _carry(self, at: float, rank: int, peer: int, tag: int, copy: torch.Tensor, transit: SimulatedTransit) -> None:
        def come() -> None:
            if not self._reaches(self.members[rank], self.members[peer]):
                self._carry(
                    self.world.now + 0.5, rank, peer, tag, copy, transit
                )  # it is sent again until it gets through
            elif peer not in self.failed:
                self._arrived.setdefault((rank, peer, tag), deque()).append((copy, transit))
                self._match((rank, peer, tag))

        self.world.after(at - self.world.now, come)

    def receive(self, rank: int, tensor: torch.Tensor, peer: int, tag: int) -> SimulatedTransit:
        transit = self.begin(rank, peer, tensor)
        if not transit.done:
            self._asked.setdefault((peer, rank, tag), deque()).append(transit)
            self._match((peer, rank, tag))
        return transit

    def _match(self, way: tuple[int, int, int]) -> None:
        arrived, asked = self._arrived.get(way), self._asked.get(way)
        while arrived and asked:
            (copy, sent), wanted = arrived.popleft(), asked.popleft()
            if copy.numel() != wanted.tensor.numel():
                wanted.end(Mismatch(f"{copy.numel()} values come, and {wanted.tensor.numel()} were expected"))
                continue
            if not wanted.done:
                wanted.tensor.copy_(copy)
            wanted.end()
            sent.end()

    def fail(self, rank: int, error: CommError) -> None:
        """All that this rank (by its index) waits for fails, and all that it begins."""
        if rank not in self.failed:
            self.failed[rank] = error
            for _, transit in self._open[rank]:
                transit.end(error)
            self.changed.change()

    def notice(self, gone: int, of: int) -> None:
        """A rank's library notices that another rank's process has ended."""
        if of not in self.failed:
            for peer, transit in self._open[of]:
                if peer == gone:
                    transit.end(PeerLost(CLOSED))

    def allgather(self, rank: int, data: bytes, timeout: float) -> list[bytes]:
        """The next collective operation of a rank. Raises CommError."""
        number = self._count[rank]
        self._count[rank] += 1
        given = self.calls.setdefault((number, len(self.members)), {})
        given[rank] = data
        self.changed.change()
        if not self.changed.wait(lambda: len(given) == len(self.members) or rank in self.failed, timeout):
            raise CommTimeout("a collective operation was not done in time")
        if len(given) < len(self.members):
            raise type(self.failed[rank])(str(self.failed[rank]))
        return [given[each] for each in range(len(self.members))]


class SimulatedMail:
    """The messages of one rank of a group."""

    def __init__(self, group: MailGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> SimulatedTransit:
        return self.group.send(self.rank, tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> SimulatedTransit:
        return self.group.receive(self.rank, tensor, peer, tag)

    def abort(self) -> None:
        self.group.fail(self.rank, PeerLost(CLOSED))
