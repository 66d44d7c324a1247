"""A pair of neighbouring ranks that average their weights, where one rank sends requests (asks) and the other answers.
Each rank uses one thread per neighbour."""

from __future__ import annotations

import enum
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import NamedTuple

import torch

from dadt.algorithms.gossip.link_state import LinkState
from dadt.algorithms.gossip.snapshot import WeightSnapshot
from dadt.comm.executors.base import P2PWork, PointToPoint
from dadt.errors import CommTimeout

_SLICE = 1 << 28
"""Largest number of bytes in one message, because some communication libraries count bytes in 32 bits."""
_SEVERAL = 60.0
"""Seconds of one wait for the neighbour's next request. If no request comes, the thread waits again."""


class MessageKind(enum.IntEnum):
    """Kind of a message between two neighbours."""

    FINISH = 0
    """The sender will send no more requests. The value is 0 because memory for messages stays 0 under the null
    executor, which receives nothing."""
    WEIGHTS = 1
    NOTHING = 2
    """The answering rank cannot average, because it has no weights yet, has weights of another layout, or does not know
    the earlier exchanges. The asking rank then begins with a new state."""


class Head(NamedTuple):
    """Header that is sent before the weights."""

    kind: MessageKind
    crc: int
    number: int
    """Number of earlier exchanges since both ranks began with a new state. With 0, both ranks begin with a new
    state."""
    bytes: int


class LinkMessages:
    """Sends and receives messages between this rank and one neighbour, in order. Used by one thread."""

    def __init__(self, mail: PointToPoint, rank: int, peer: int, name: int, tag: int, timeout: float) -> None:
        """rank, name: the numbers of this rank and of the neighbour in messages for the user. peer: the neighbour's
        number in `mail`."""
        self.peer = peer
        self._name = name
        self._mail = mail
        self._rank = rank
        self._tag = tag
        self._timeout = timeout
        self.sent = 0
        """Number of bytes of weights that were sent to the neighbour so far."""

    def say(self, kind: MessageKind) -> list[P2PWork]:
        """Send a message that has a header and no weights."""
        return self._send(Head(kind, 0, 0, 0))

    def send(self, state: LinkState, weights: torch.Tensor) -> list[P2PWork]:
        """Start sending weights, without waiting. The weights must not change until all returned transfers are done."""
        self.sent += len(weights)
        return self._send(
            Head(MessageKind.WEIGHTS, state.crc, state.number, len(weights)), *torch.split(weights, _SLICE)
        )

    def _send(self, head: Head, *slices: torch.Tensor) -> list[P2PWork]:
        return [
            self._mail.send(each, self.peer, self._tag)
            for each in (torch.tensor(head, dtype=torch.int64, device="cpu"), *slices)
        ]

    def receive_head(self, *, patient: bool = False) -> Head:
        """Receive the header of a message. patient: whether to wait without a time limit."""
        head = torch.zeros(len(Head._fields), dtype=torch.int64, device="cpu")
        transit = self._mail.receive(head, self.peer, self._tag)
        if patient:
            while not done_within(transit, _SEVERAL):
                pass
        else:
            self.wait([transit])
        kind, *rest = head.tolist()
        return Head(MessageKind(kind), *rest)

    def receive(self, weights: torch.Tensor) -> None:
        self.wait([self._mail.receive(each, self.peer, self._tag) for each in torch.split(weights, _SLICE)])

    def wait(self, transits: list[P2PWork]) -> None:
        """Wait until all transfers are done. Raises CommTimeout, which names the neighbour, or PeerLost."""
        deadline = monotonic() + self._timeout
        for transit in transits:
            if not done_within(transit, max(0.0, deadline - monotonic())):
                raise CommTimeout(f"rank {self._rank} waited {self._timeout:g} s for rank {self._name} in a gossip")


def done_within(transit: P2PWork, seconds: float) -> bool:
    """Wait for the transfer. Returns whether it is done in time, and raises its error if it fails."""
    try:
        transit.wait(seconds)
    except CommTimeout:
        if not transit.done:
            return False
        transit.wait(0.0)  # raises the transfer's own error, unless it ended successfully just now
    return True


class LinkEnd:
    """Base class of the asking and the answering rank of a pair of neighbours."""

    def __init__(
        self,
        line: LinkMessages,
        weights: Callable[[], AbstractContextManager[WeightSnapshot | None]],
        state: Callable[[WeightSnapshot], LinkState],
    ) -> None:
        """weights: function that returns the current weights for one exchange. state: function that creates the state
        for the first exchange from these weights."""
        self.line = line
        self.plain = 0
        """Number of bytes of weights that would have been sent to the neighbour so far without compression."""
        self._weights = weights
        self._begin = state
        self._state: LinkState | None = None

    def _send(self, snapshot: WeightSnapshot, state: LinkState, mine: torch.Tensor) -> list[P2PWork]:
        self.plain += snapshot.bytes
        return self.line.send(state, mine)


class Asking(LinkEnd):
    """The rank of a pair that sends requests: it starts one exchange for each call of `order`."""

    def __init__(
        self,
        line: LinkMessages,
        weights: Callable[[], AbstractContextManager[WeightSnapshot | None]],
        state: Callable[[WeightSnapshot], LinkState],
        ended: Callable[[Asking, bool], None],
    ) -> None:
        """ended: callback after each exchange, with this object and whether the weights were averaged as arguments."""
        super().__init__(line, weights, state)
        self.asked: float | None = None
        """Time at which the running exchange with the neighbour began; None if no exchange runs. Set by the owner of
        this object."""
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended = ended

    def order(self) -> None:
        """Start one more averaging with the neighbour. May be called on any thread."""
        self._orders.put(True)

    def retire(self) -> None:
        """Report to the neighbour that this rank is done, after all averagings that `order` has started. May be called
        on any thread; takes no lock."""
        self._orders.put(False)

    def run(self) -> None:
        while self._orders.get():
            self._ended(self, self._ask())
        self._state = None
        self.line.wait(self.line.say(MessageKind.FINISH))

    def _ask(self) -> bool:
        with self._weights() as snapshot:
            return snapshot is not None and self._average(snapshot)

    def _average(self, snapshot: WeightSnapshot) -> bool:
        if self._state is None or not self._state.fits(snapshot):
            self._state = self._begin(snapshot)
        state = self._state
        mine, theirs = snapshot.take(state.size), snapshot.take(state.size)
        step = state.say(snapshot, mine)
        transits = self._send(snapshot, state, mine)
        averaged = self.line.receive_head().kind is MessageKind.WEIGHTS
        if averaged:
            self.line.receive(theirs)
        self.line.wait(transits)
        if averaged:
            state.settle(snapshot, mine, theirs, step)
        else:
            self._state = None
        snapshot.give_back(mine, theirs)
        return averaged


class Answering(LinkEnd):
    """The rank of a pair that answers requests and never sends any."""

    def run(self) -> None:
        """Answer the neighbour's requests until the neighbour reports that it has finished."""
        while (question := self.line.receive_head(patient=True)).kind is not MessageKind.FINISH:
            self._answer(question)
        self._state = None

    def _answer(self, question: Head) -> None:
        with self._weights() as snapshot:
            state = None if snapshot is None else self._state_for(question, snapshot)
            if snapshot is None or state is None:
                self.line.receive(torch.empty(question.bytes, dtype=torch.uint8, device="cpu"))
                self.line.wait(self.line.say(MessageKind.NOTHING))
            else:
                self._average(snapshot, state)

    def _average(self, snapshot: WeightSnapshot, state: LinkState) -> None:
        mine, theirs = snapshot.take(state.size), snapshot.take(state.size)
        self.line.receive(theirs)
        step = state.say(snapshot, mine)
        transits = self._send(snapshot, state, mine)
        state.settle(snapshot, mine, theirs, step)
        self.line.wait(transits)
        snapshot.give_back(mine, theirs)

    def _state_for(self, question: Head, snapshot: WeightSnapshot) -> LinkState | None:
        """Return the state shared with the neighbour for answering this request, or None if the neighbour's state does
        not match this rank's."""
        if question.number == 0:
            self._state = self._begin(snapshot)
        state = self._state
        if state is None or not state.fits(snapshot):
            return None
        return state if (state.crc, state.number) == (question.crc, question.number) else None
