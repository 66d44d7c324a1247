"""Requests of new workers that replay the script up to the running ranks' step in order to join. All ranks handle a
request at the end of the same step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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


class Request:
    """A request of new workers that this rank has received and not handled yet."""

    def __init__(self, approach: Approach) -> None:
        self.approach = approach
        self._due: int | None = None

    def agree_on(self, step: int) -> None:
        """Note the number of the step after which all ranks handle the request. Any thread may call this."""
        self._due = step

    def is_due(self, step: int) -> bool:
        return self._due is not None and step >= self._due


class Approaches:
    """The requests of new workers that one rank has received. `hear` and `forget` run on the thread that listens to the
    agent, all other methods on the training thread."""

    def __init__(self) -> None:
        self.heard = 0
        """Number of the newest request that this rank has received, 0 if none."""
        self._open: dict[int, Request] = {}
        self._agreed = 0

    def forget(self) -> None:
        """Forget all requests, because ranks were lost or have joined, and the agent then sends every open request
        again."""
        self._open.clear()
        self.heard = 0

    def hear(self, approach: Approach) -> Request:
        """Store a request that the agent has sent, again if it was forgotten."""
        request = self._open[approach.number] = Request(approach)
        self.heard = max(self.heard, approach.number)
        return request

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
        due = sorted(n for n, each in list(self._open.items()) if n <= self._agreed or each.is_due(step))
        return [request.approach for number in due if (request := self._open.pop(number, None)) is not None]
