"""One edge of a gossip, as each of its two ranks sees it: the one asks, the other answers. Each has a thread."""

from __future__ import annotations

import enum
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import torch

from dadt.errors import CommTimeout

if TYPE_CHECKING:
    from dadt.algorithms.gossip.link_state import LinkState
    from dadt.algorithms.gossip.snapshot import WeightSnapshot
    from dadt.comm.executors.base import P2PWork, PointToPoint

_SLICE = 1 << 28
"""Bytes of one message: some libraries count in 32 bits."""
_SEVERAL = 60.0
"""Seconds after which a thread that waits for a question begins to wait for it again."""


class MessageKind(enum.IntEnum):
    """The kinds of messages."""

    FINISH = 0
    """Nothing will be asked any more. Also what a receive leaves that receives nothing (the null executor's)."""
    WEIGHTS = 1
    NOTHING = 2
    """There are no weights yet, or they are of another kind than those of the question, or this end has not had the
    exchanges before. The end that asks then begins with a new state."""


class Head(NamedTuple):
    """The head that goes before the weights."""

    kind: MessageKind
    crc: int
    number: int
    """Number of the exchange since the two ends have begun; 0: they begin."""
    bytes: int


class LinkMessages:
    """Messages between this rank and one neighbour, in order. One thread."""

    def __init__(self, mail: PointToPoint, rank: int, peer: int, name: int, tag: int, timeout: float) -> None:
        """rank, name: this rank's and the neighbour's, as the user knows them. peer: the neighbour's in the mail."""
        self.peer = peer
        self._name = name
        self._mail = mail
        self._rank = rank
        self._tag = tag
        self._timeout = timeout
        self.sent = 0
        """Bytes of weights that were sent to the neighbour so far."""

    def say(self, kind: MessageKind) -> list[P2PWork]:
        """Send a message that is a head alone."""
        return self._send(Head(kind, 0, 0, 0))

    def send(self, state: LinkState, weights: torch.Tensor) -> list[P2PWork]:
        """Does not wait. The weights must not change until all is done."""
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
        """patient: the neighbour may say nothing for as long as it likes."""
        head = torch.zeros(len(Head._fields), dtype=torch.int64, device="cpu")
        transit = self._mail.receive(head, self.peer, self._tag)
        if patient:
            while not _done_within(transit, _SEVERAL):
                pass
        else:
            self.wait([transit])
        kind, *rest = head.tolist()
        return Head(MessageKind(kind), *rest)

    def receive(self, weights: torch.Tensor) -> None:
        self.wait([self._mail.receive(each, self.peer, self._tag) for each in torch.split(weights, _SLICE)])

    def wait(self, transits: list[P2PWork]) -> None:
        """Wait until all are done. Raises CommTimeout that names the neighbour, and PeerLost."""
        deadline = monotonic() + self._timeout
        for transit in transits:
            if not _done_within(transit, max(0.0, deadline - monotonic())):
                raise CommTimeout(f"rank {self._rank} waited {self._timeout:g} s for rank {self._name} in a gossip")


def _done_within(transit: P2PWork, seconds: float) -> bool:
    try:
        transit.wait(seconds)
    except CommTimeout:
        if not transit.done:
            return False
        transit.wait(0.0)  # its own error, or it has come just now
    return True


class LinkEnd:
    """The part that both ends have in common."""

    def __init__(
        self,
        line: LinkMessages,
        weights: Callable[[], AbstractContextManager[WeightSnapshot | None]],
        state: Callable[[WeightSnapshot], LinkState],
    ) -> None:
        """weights: those of now, for one exchange. state: begins an exchange with them."""
        self.line = line
        self.plain = 0
        """Bytes that `line` would have sent without compression."""
        self._weights = weights
        self._begin = state
        self._state: LinkState | None = None

    def _send(self, snapshot: WeightSnapshot, state: LinkState, mine: torch.Tensor) -> list[P2PWork]:
        self.plain += snapshot.bytes
        return self.line.send(state, mine)


class Asking(LinkEnd):
    """The side that asks, once for each order."""

    def __init__(
        self,
        line: LinkMessages,
        weights: Callable[[], AbstractContextManager[WeightSnapshot | None]],
        state: Callable[[WeightSnapshot], LinkState],
        ended: Callable[[Asking, bool], None],
    ) -> None:
        """ended: called after each exchange, with whether there was an average."""
        super().__init__(line, weights, state)
        self.asked: float | None = None
        """The time at which the exchange under way began, for whoever gives the orders."""
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended = ended

    def order(self) -> None:
        """Order one more average. Called on any thread."""
        self._orders.put(True)

    def retire(self) -> None:
        """Tell the neighbour, after all ordered averages, that this rank is done. Any thread; takes no lock."""
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
    """The side that answers, and never asks."""

    def run(self) -> None:
        """Answer until the neighbour says that it is done."""
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
        """The state that both ends know; None if this one does not know what the other does."""
        if question.number == 0:
            self._state = self._begin(snapshot)
        state = self._state
        if state is None or not state.fits(snapshot):
            return None
        return state if (state.crc, state.number) == (question.crc, question.number) else None
