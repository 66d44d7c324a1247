"""Averages one rank's weights with its neighbours, pair by pair, in background threads. Chooses the neighbour and the
time, and counts exchanges."""

from __future__ import annotations

import statistics
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch

from dadt.algorithms.gossip.choco import Choco
from dadt.algorithms.gossip.edge import Answering, Asking, LinkMessages
from dadt.algorithms.gossip.link_state import LinkState, PlainLinkState
from dadt.algorithms.gossip.powergossip import PowerGossip
from dadt.algorithms.gossip.snapshot import WeightSnapshot
from dadt.algorithms.gossip.topology import asks, neighbours, partner
from dadt.comm.compression import CODECS
from dadt.comm.executors.base import PointToPoint
from dadt.errors import CommError, CommTimeout
from dadt.world import World

_LATE_SECONDS = 1.0
"""Least number of seconds after which an answer is late, so that another neighbour gets a request as well."""
_LATE_TIMES = 3.0
"""An answer is late after this multiple of the median seconds of recent answers, but not before _LATE_SECONDS."""
_EXPLAIN_SECONDS = 1.0
"""Seconds to wait after a failed message for a report that names the lost rank."""
_STOP_SECONDS = 5.0
"""Seconds to wait for threads to end when their messages have failed."""


class Pairing:
    """Averages one rank's weights with its neighbours, one at a time. If an answer is late, it averages with another
    neighbour meanwhile.

    The training thread calls `publish` and `check` between steps; both return without waiting for other ranks.
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
        """mail: sends messages between ranks. group: the ranks that average. members: the original numbers of the
        group's ranks."""
        self.ages: Counter[int] = Counter()
        """Number of exchanges applied to the live weights, by the number of steps made since the weights were copied
        for the exchange."""
        self.asked = 0
        """Number of exchanges that this rank has requested and that gave an average."""
        self.in_vain = 0
        """Number of exchanges without an average, because the neighbour had no weights of equal layout."""
        self._topology = topology
        self._tag = tag
        self._compression = compression
        self._snapshot: WeightSnapshot | None = None
        self._token: list[Any] = []
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._replaced: list[tuple[WeightSnapshot, list[weakref.ref[torch.Tensor]]]] = []
        """Snapshots of parameters that the script has replaced by other parameters. Exchanges that began earlier may
        still add to these snapshots."""
        self._step = 0
        """Number of calls of `publish`, one between each two steps. Unlike the script's step count, this number never
        goes back."""
        self._error: Exception | None = None
        self._failed = 0.0
        """Time at which the error in `_error` occurred, in seconds of time.monotonic."""
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
        """Bytes sent to neighbours over earlier connections, and bytes that would have been sent without compression.
        """
        self.connect(mail, group, members)

    def connect(self, mail: PointToPoint, group: World, members: Sequence[int]) -> None:
        """Connect to the neighbours in `group`, to average with them over `mail`. Messages on the previous connection
        have failed, so an average that was under way may have been applied by only one of its two ranks. members: the
        original numbers of the group's ranks.
        """
        self.stop_threads()
        with self._lock:
            self._sent_before = self.sent
            self._group, self._members = group, members
            self._error, self._fresh = None, self._snapshot is not None
            self._edges = {
                peer: self._edge(mail, peer) for peer in neighbours(self._topology, group.rank, len(members))
            }
            # The threads are daemons, so that a peer that never answers cannot keep this process from ending.
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
        """Bytes sent to neighbours so far, and bytes that would have been sent without compression."""
        edges, (sent, plain) = self._edges.values(), self._sent_before
        return sent + sum(edge.line.sent for edge in edges), plain + sum(edge.plain for edge in edges)

    @torch.no_grad()
    def publish(self, parameters: Sequence[torch.Tensor]) -> None:
        """Apply the finished averages to the live weights, and let neighbours average with the current weights. Called
        between two steps."""
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
        """Raise the error that ended a background thread. survives: whether ranks connect again after failed messages,
        so that CommError is not raised."""
        if self._error is not None and not (survives and isinstance(self._error, CommError)):
            raise self._error

    @property
    def failure(self) -> CommError | None:
        """The error that ended this rank's messages. None if there is none, or it occurred less than _EXPLAIN_SECONDS
        ago."""
        explained = monotonic() - self._failed >= _EXPLAIN_SECONDS
        return self._error if isinstance(self._error, CommError) and explained else None

    def retire(self) -> None:
        """Stop requesting averages from neighbours, but continue to answer their requests. May be called on any thread
        at any time; takes no lock."""
        self._retired = True
        for edge in self._asking.values():
            edge.retire()

    def forsake(self) -> None:
        """Stop requesting averages from neighbours, as this rank needs none any more. The copy of the weights that
        neighbours are sent is freed once none of them requests it any more."""
        self._forsaken = True
        self.retire()
        self._let_go()

    def close(self) -> None:
        """Wait until all neighbours have finished, so that no more averages are requested. Raises CommTimeout, which
        names the missing rank."""
        deadline = monotonic() + self._timeout
        for peer, thread in self._threads.items():
            thread.join(max(0.0, deadline - monotonic()))
            if thread.is_alive():
                mine, other = self._members[self._group.rank], self._members[peer]
                raise CommTimeout(f"rank {mine} waited {self._timeout:g} s for rank {other} at the end of a gossip")
        self.check(survives=False)

    def stop(self) -> None:
        """Stop the background threads, after training has ended or failed. All messages must have ended."""
        self.retire()
        self.stop_threads()

    def stop_threads(self) -> None:
        """Wait up to _STOP_SECONDS seconds for the background threads to end, whose messages have failed."""
        for edge in self._asking.values():
            edge.retire()
        deadline = monotonic() + _STOP_SECONDS
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - monotonic()))

    def _take_over(self, snapshot: WeightSnapshot, parameters: Sequence[weakref.ref[torch.Tensor]]) -> bool:
        """Add the differences of a replaced snapshot to the live parameters, since the neighbours have moved their
        weights by the same amounts. Returns whether exchanges still use the snapshot."""
        with self._lock:
            used = snapshot.users > 0
        live = [ref() for ref in parameters]
        snapshot.hand_over([None if p is None else p.data for p in live])
        return used

    def _link_state(self, snapshot: WeightSnapshot) -> LinkState:
        return link_state(self._compression, snapshot, asks(self._group.rank))

    @contextmanager
    def _weights(self) -> Iterator[WeightSnapshot | None]:
        """Provide the newest snapshot of the weights for one exchange. If a newer one replaces it meanwhile, the
        exchange's result still reaches the weights."""
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
        """Start the next exchange, if the weights have changed since the last one and every exchange under way is
        late."""
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
    """Return the state that one rank of a pair shares with its neighbour. name: the value of --compression. asks:
    whether this rank sends the requests; otherwise it answers them."""
    family, _, rank = name.partition(":")
    if family == "powersgd":
        return PowerGossip(name, snapshot, int(rank), asks)
    return Choco(name, snapshot, CODECS[name]) if name in CODECS else PlainLinkState(name, snapshot)
