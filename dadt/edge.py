"""One edge of a gossip, as each of its two ranks sees it: the one asks, the other answers. Each has a thread."""

from __future__ import annotations

import enum
import queue
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import torch

from dadt.errors import CommTimeout

if TYPE_CHECKING:
    from dadt.executors.base import Mail, Transit
    from dadt.published import Published

_SLICE = 1 << 28
"""Bytes of one message: some libraries count in 32 bits."""
_SEVERAL = 60.0
"""Seconds after which a thread that waits for a question begins to wait for it anew."""


class Kind(enum.IntEnum):
    """What a message says."""

    FAREWELL = 0
    """Nothing will be asked any more. Also what a receive leaves that receives nothing (the null executor's)."""
    WEIGHTS = 1
    NOTHING = 2
    """There are no weights yet, or they are of another kind than those of the question."""


class Head(NamedTuple):
    """What goes before the weights."""

    kind: Kind
    crc: int
    bytes: int


class Line:
    """Messages between this rank and one neighbour, in order. One thread."""

    def __init__(self, mail: Mail, rank: int, peer: int, tag: int, timeout: float) -> None:
        self.peer = peer
        self._mail = mail
        self._rank = rank
        self._tag = tag
        self._timeout = timeout

    def send(self, kind: Kind, crc: int = 0, weights: torch.Tensor | None = None) -> list[Transit]:
        """Does not wait. The weights must not change until all is done."""
        slices = [] if weights is None else list(torch.split(weights, _SLICE))
        head = torch.tensor([kind, crc, 0 if weights is None else len(weights)], dtype=torch.int64)
        return [self._mail.send(each, self.peer, self._tag) for each in (head, *slices)]

    def receive_head(self, *, patient: bool = False) -> Head:
        """patient: the neighbour may say nothing for as long as it likes."""
        head = torch.zeros(3, dtype=torch.int64)
        transit = self._mail.receive(head, self.peer, self._tag)
        if patient:
            while not _done_within(transit, _SEVERAL):
                pass
        else:
            self.wait([transit])
        kind, crc, size = head.tolist()
        return Head(Kind(kind), crc, size)

    def receive(self, weights: torch.Tensor) -> None:
        self.wait([self._mail.receive(each, self.peer, self._tag) for each in torch.split(weights, _SLICE)])

    def wait(self, transits: list[Transit]) -> None:
        """Until all are done. Raises CommTimeout that names the neighbour, and PeerLost."""
        deadline = monotonic() + self._timeout
        for transit in transits:
            if not _done_within(transit, max(0.0, deadline - monotonic())):
                raise CommTimeout(f"rank {self._rank} waited {self._timeout:g} s for rank {self.peer} in a gossip")


def _done_within(transit: Transit, seconds: float) -> bool:
    try:
        transit.wait(seconds)
    except CommTimeout:
        if not transit.done:
            return False
        transit.wait(0.0)  # its own error, or it has come just now
    return True


class Asking:
    """The side that asks, once for each order."""

    def __init__(self, line: Line, weights: Callable[[], Published | None], ended: Callable[[Asking, bool], None]):
        """ended: called after each exchange, with whether there was an average."""
        self.line = line
        self.asked: float | None = None
        """Since when it is under way; for whoever gives the orders."""
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._weights = weights
        self._ended = ended

    def order(self) -> None:
        """Average once more. Any thread."""
        self._orders.put(True)

    def retire(self) -> None:
        """Say farewell after what is ordered. Any thread, at any time: takes no lock."""
        self._orders.put(False)

    def run(self) -> None:
        while self._orders.get():
            self._ended(self, self._ask())
        self.line.wait(self.line.send(Kind.FAREWELL))

    def _ask(self) -> bool:
        published = self._weights()
        if published is None:
            return False
        mine, theirs = published.take(), published.take()
        step = published.read(mine)
        transits = self.line.send(Kind.WEIGHTS, published.crc, mine)
        answer = self.line.receive_head()
        if answer.kind is Kind.WEIGHTS:
            self.line.receive(theirs)
        self.line.wait(transits)
        if answer.kind is Kind.WEIGHTS:
            published.approach(theirs, mine, step)
        published.give_back(mine, theirs)
        return answer.kind is Kind.WEIGHTS


class Answering:
    """The side that answers, and never asks."""

    def __init__(self, line: Line, weights: Callable[[], Published | None]) -> None:
        self.line = line
        self._weights = weights

    def run(self) -> None:
        """Until the neighbour says farewell."""
        while (question := self.line.receive_head(patient=True)).kind is not Kind.FAREWELL:
            self._answer(question)

    def _answer(self, question: Head) -> None:
        published = self._weights()
        if published is None or published.crc != question.crc:
            self.line.receive(torch.empty(question.bytes, dtype=torch.uint8))
            self.line.wait(self.line.send(Kind.NOTHING))
            return
        mine, theirs = published.take(), published.take()
        self.line.receive(theirs)
        published.meet(theirs, mine)
        self.line.wait(self.line.send(Kind.WEIGHTS, published.crc, mine))
        published.give_back(mine, theirs)
