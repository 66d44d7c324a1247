"""One rank's pairwise averages, in the background: with whom, when, and how many."""

from __future__ import annotations

import statistics
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from dadt.algorithms.gossip.choco import Choco
from dadt.algorithms.gossip.edge import Answering, Asking, LinkMessages
from dadt.algorithms.gossip.link_state import LinkState, PlainLinkState
from dadt.algorithms.gossip.powergossip import PowerGossip
from dadt.algorithms.gossip.snapshot import WeightSnapshot
from dadt.algorithms.gossip.topology import asks, neighbours, partner
from dadt.comm.compression import CODECS
from dadt.errors import CommError, CommTimeout

if TYPE_CHECKING:
    from dadt.comm.executors.base import PointToPoint
    from dadt.world import World

_LATE_SECONDS = 1.0
"""Seconds that an answer may take at least, before another neighbour is asked as well."""
_LATE_TIMES = 3.0
"""The same, as a multiple of the median seconds of the last answers; the greater of the two counts."""
_EXPLAIN_SECONDS = 1.0
"""Seconds that it may take from a failed message until the loss of the rank that has caused it is reported."""
_STOP_SECONDS = 5.0
"""Seconds that threads may take to end, once nothing is to be waited for."""


class Pairing:
    """Averages with a rank's neighbours, each time with one; with another one meanwhile where an answer is late.

    One thread trains and calls `publish` and `check` between steps; it waits for nobody there.
    """

    def __init__(
        self,
        mail: PointToPoint,
        group: World,
        members: Sequence[int],
        topology: str,
        tag: int,
        timeout: float,
        compression: str = "none",
    ) -> None:
        """mail, group, members: as in `connect`."""
        self.ages: Counter[int] = Counter()
        """Exchanges whose difference has reached the live weights, by how many steps these had made meanwhile."""
        self.asked = 0
        """Exchanges that this rank has asked for and got."""
        self.in_vain = 0
        """Exchanges in which the neighbour had no weights of the kind."""
        self._topology = topology
        self._tag = tag
        self._compression = compression
        self._snapshot: WeightSnapshot | None = None
        self._token: list[Any] = []
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._replaced: list[tuple[WeightSnapshot, list[weakref.ref[torch.Tensor]]]] = []
        """Copies of what the script has changed since: differences may still come to them."""
        self._step = 0
        """Step boundaries so far: unlike the script's steps, they go forward only."""
        self._error: Exception | None = None
        self._failed = 0.0
        """The time of that error (time.monotonic)."""
        self._lock = threading.Lock()
        self._fresh = False
        self._turn = 0
        self._seconds: deque[float] = deque(maxlen=50)
        self._timeout = timeout
        self._edges: dict[int, Asking | Answering] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._at_work = 0
        self._retired = self._forsaken = False
        self._sent_before = (0, 0)
        """Bytes sent to neighbours over earlier connections, and what they would be without compression."""
        self.connect(mail, group, members)

    def connect(self, mail: PointToPoint, group: World, members: Sequence[int]) -> None:
        """Average with the neighbours in this group, whose messages go this way from now on. Messages of before
        have failed: an average that was under way may count on one of its two ranks. members: the group's ranks."""
        self.stop_threads()
        with self._lock:
            self._sent_before = self.sent
            self._group, self._members = group, members
            self._error, self._fresh = None, self._snapshot is not None
            self._edges = {
                peer: self._edge(mail, peer) for peer in neighbours(self._topology, group.rank, len(members))
            }
            # Daemons: a peer that never answers must not keep the process from ending.
            self._threads = {
                peer: threading.Thread(target=self._run, args=(edge,), name=f"dadt-gossip-{members[peer]}", daemon=True)
                for peer, edge in self._edges.items()
            }
            self._at_work += len(self._edges)
        for thread in self._threads.values():
            thread.start()
        if self._retired:
            self.retire()
        else:
            self._ask()

    def _edge(self, mail: PointToPoint, peer: int) -> Asking | Answering:
        line = LinkMessages(mail, self._members[self._group.rank], peer, self._members[peer], self._tag, self._timeout)
        if asks(self._group.rank):
            return Asking(line, self._weights, self._link_state, self._ended)
        return Answering(line, self._weights, self._link_state)

    @property
    def _asking(self) -> dict[int, Asking]:
        return {peer: edge for peer, edge in self._edges.items() if isinstance(edge, Asking)}

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes to neighbours, and what they would be without compression."""
        edges, (sent, plain) = self._edges.values(), self._sent_before
        return sent + sum(edge.line.sent for edge in edges), plain + sum(edge.plain for edge in edges)

    @torch.no_grad()
    def publish(self, parameters: Sequence[torch.Tensor]) -> None:
        """At a step boundary: take over what has been averaged, and let others average with the weights as they are."""
        self._step += 1
        tensors = [p.data for p in parameters]
        token = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        snapshot = self._snapshot
        self._replaced = [each for each in self._replaced if self._take_over(*each)]
        if snapshot is not None and token != self._token:
            self._take_over(snapshot, self._parameters)
            self._replaced.append((snapshot, self._parameters))
            snapshot = None
        snapshot = snapshot or WeightSnapshot(tensors)
        self._parameters = [weakref.ref(p) for p in parameters]
        self.ages += snapshot.publish(tensors, self._step)
        self._token = token
        with self._lock:
            self._snapshot = snapshot
            self._fresh = True
        self._ask()

    def check(self, *, survives: bool) -> None:
        """Raise the error that has ended a thread. survives: failed messages are none, as ranks connect again."""
        if self._error is not None and not (survives and isinstance(self._error, CommError)):
            raise self._error

    @property
    def failure(self) -> CommError | None:
        """The error that ended this rank's messages, once _EXPLAIN_SECONDS have passed since; None otherwise."""
        explained = monotonic() - self._failed >= _EXPLAIN_SECONDS
        return self._error if isinstance(self._error, CommError) and explained else None

    def retire(self) -> None:
        """Ask nobody any more; go on answering. Any thread, at any time: takes no lock."""
        self._retired = True
        for edge in self._asking.values():
            edge.retire()

    def forsake(self) -> None:
        """Like `retire`, where nobody needs the weights any more. Their memory is freed once no neighbour asks."""
        self._forsaken = True
        self.retire()
        self._let_go()

    def close(self) -> None:
        """Wait until nobody asks or is asked any more. Raises CommTimeout that names who is missing."""
        deadline = monotonic() + self._timeout
        for peer, thread in self._threads.items():
            thread.join(max(0.0, deadline - monotonic()))
            if thread.is_alive():
                mine, other = self._members[self._group.rank], self._members[peer]
                raise CommTimeout(f"rank {mine} waited {self._timeout:g} s for rank {other} at the end of a gossip")
        self.check(survives=False)

    def stop(self) -> None:
        """End the threads, after the end or a failure, which has ended all messages."""
        self.retire()
        self.stop_threads()

    def stop_threads(self) -> None:
        """Wait at most _STOP_SECONDS for the threads to end, whose messages have failed."""
        for edge in self._asking.values():
            edge.retire()
        deadline = monotonic() + _STOP_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - monotonic()))

    def _take_over(self, snapshot: WeightSnapshot, parameters: Sequence[weakref.ref[torch.Tensor]]) -> bool:
        """Apply what was added to a replaced copy, as neighbours moved by as much. Returns whether more may come."""
        with self._lock:
            used = snapshot.users > 0
        live = [ref() for ref in parameters]
        snapshot.hand_over([None if p is None else p.data for p in live])
        return used

    def _link_state(self, snapshot: WeightSnapshot) -> LinkState:
        return link_state(self._compression, snapshot, asks(self._group.rank))

    @contextmanager
    def _weights(self) -> Iterator[WeightSnapshot | None]:
        """The weights for one exchange: if they are replaced meanwhile, what it adds still counts."""
        with self._lock:
            snapshot = self._snapshot
            if snapshot is not None:
                snapshot.users += 1
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                with self._lock:
                    snapshot.users -= 1

    def _ask(self) -> None:
        """Order the next exchange, where the weights are new since the last one and no other one goes well."""
        with self._lock:
            now = monotonic()
            under_way = [now - edge.asked for edge in self._asking.values() if edge.asked is not None]
            if not self._fresh or any(seconds < self._late_after() for seconds in under_way):
                return
            asking = self._asking
            for _ in asking:
                edge = asking[partner(self._topology, self._group.rank, self._group.world_size, self._turn)]
                self._turn += 1
                if edge.asked is None:
                    self._fresh = False
                    edge.asked = now
                    edge.order()
                    return

    def _late_after(self) -> float:
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(_LATE_SECONDS, _LATE_TIMES * usual)

    def _ended(self, edge: Asking, averaged: bool) -> None:
        with self._lock:
            if averaged and edge.asked is not None:
                self._seconds.append(monotonic() - edge.asked)
            self.asked += averaged
            self.in_vain += not averaged
            edge.asked = None
        if averaged:
            self._ask()

    def _run(self, edge: Asking | Answering) -> None:
        try:
            edge.run()
        except Exception as error:  # noqa: BLE001 (raised on the training thread)
            if edge in self._edges.values() and self._error is None:
                self._error, self._failed = error, monotonic()
        with self._lock:
            self._at_work -= 1
        self._let_go()

    def _let_go(self) -> None:
        if self._forsaken and not self._at_work:
            self._snapshot, self._replaced = None, []


def link_state(name: str, snapshot: WeightSnapshot, asks: bool) -> LinkState:
    """The state for one end of an edge. name: as given to --compression; asks: this end asks, the other one answers."""
    family, _, rank = name.partition(":")
    if family == "powersgd":
        return PowerGossip(name, snapshot, int(rank), asks)
    return Choco(name, snapshot, CODECS[name]) if name in CODECS else PlainLinkState(name, snapshot)
