"""Requests of new workers that replay the script up to the running ranks' step in order to join. All ranks handle a
request at the end of the same step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dadt.train.common_step import Due


class Approach(NamedTuple):
    """Request of a new worker, or of all new workers of an island, which ask how far the running ranks have
    trained."""

    number: int
    """The request's number, counted from 1 over the whole job."""
    rank: int
    """Rank of the new worker that sent the request; in islands, of the first new worker."""
    known: tuple[int, ...]
    """For each of the new workers, the number of bytes that it already has of the recorded values, which scripts on
    running ranks have read from tensors."""
    last: bool
    """Whether this is the last request. At the step at which running ranks handle it, they wait for the new workers,
    which then join them."""


class Approaches:
    """The requests of new workers that one rank has received. `hear` and `forget` run on the thread that listens to the
    agent, all other methods on the training thread."""

    def __init__(self) -> None:
        self.heard = 0
        """Number of the newest request that this rank has received, 0 if none."""
        self._open: dict[int, tuple[Approach, Due]] = {}
        """Requests that are not handled yet, each with the step at which they are if ranks find one for it."""
        self._agreed = 0

    def forget(self) -> None:
        """Forget all requests, because ranks were lost or have joined, and the agent then sends every open request
        again."""
        self._open.clear()
        self.heard = 0

    def hear(self, approach: Approach) -> Due:
        """Store a request that the agent has sent, again if it was forgotten."""
        due = Due()
        self._open[approach.number] = approach, due
        self.heard = max(self.heard, approach.number)
        return due

    def agree(self, heard: Iterable[int]) -> None:
        """Note which requests all ranks have received. heard: number of the newest request of each rank, which came to
        all ranks with the same exchange."""
        self._agreed = max(self._agreed, min(heard))

    def begin_anew(self) -> None:
        """Reset what ranks have agreed on, because ranks have reconnected, and some may have missed an exchange or have
        just joined."""
        self._agreed = 0

    def due(self, step: int) -> list[Approach]:
        """Return the requests of new workers that all ranks must handle after the current step, each request once.
        Called after a complete step, with equal results on all ranks. step: number of steps that are complete."""
        found = list(self._open.items())
        numbers = sorted(number for number, (_, due) in found if number <= self._agreed or due.has_come(step))
        return [request[0] for number in numbers if (request := self._open.pop(number, None)) is not None]
