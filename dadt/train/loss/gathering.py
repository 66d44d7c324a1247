"""Allgathers of bytes that the training does not wait for. Messages are small, so that a rank that has received all of
them can send them to ranks that have not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dadt.errors import CommError

if TYPE_CHECKING:
    from dadt._core import Engine, Work

KEPT = 16
"""Number of allgathers whose results a rank stores, counted from the newest, because another rank may still wait for
one of them."""


class Gathering:
    """An allgather that continues on a new connection if the one on which it began is lost."""

    def __init__(
        self, name: str, data: bytes, number: int, now: float, then: Callable[[Sequence[bytes]], None]
    ) -> None:
        """number: position among all allgathers, equal on all ranks. now: the time (perf_counter). then: callback that
        gets all ranks' bytes when they have arrived, at the latest before reconnected ranks compare what they train."""
        self.name = name
        self.number = number
        self.began = now
        self._data = data
        self._then = then
        self._work: Work | None = None
        """The C++ engine's operation; None if the connection was lost before the allgather was launched."""
        self._lanes: Sequence[bytes] | None = None
        self.abandoned = False
        """Whether this rank does without the result, if others do not have it either after a loss."""

    def launch(self, engine: Engine) -> None:
        """Launch the allgather; may be called again to repeat it with another group of ranks."""
        self._work = engine.allgather(self._data, self.name)

    def settle(self, lanes: Sequence[bytes]) -> None:
        """Complete the allgather with all ranks' bytes, which may have come from another rank that has completed it."""
        self._lanes = lanes
        self._then(lanes)

    @property
    def done(self) -> bool:
        """Whether the allgather is complete or has failed."""
        return self._lanes is not None or (self._work is not None and self._work.done)

    @property
    def complete(self) -> bool:
        if self._lanes is None and self.done:
            try:
                self.wait(0.0)
            except CommError:
                return False
        return self._lanes is not None

    @property
    def lanes(self) -> Sequence[bytes]:
        """Each rank's bytes, in the order of ranks; call it after `wait`."""
        assert self._lanes is not None, "read before it was waited for"
        return self._lanes

    def wait(self, timeout: float) -> None:
        """Wait for all ranks' bytes. Raises CommTimeout after `timeout` seconds, and CommError if the allgather has
        failed."""
        if self._lanes is None:
            assert self._work is not None, "waited for before it was launched"
            self._work.wait(timeout)
            self.settle(self._work.lanes)


class Gatherings:
    """All-gathers of small values by one rank. All ranks begin them in the same order."""

    def __init__(self) -> None:
        self.newest: list[Gathering] = []
        """The most recent allgathers, in order; some may be incomplete. Empty if the loss of a rank ends the training.
        """
        self.count = 0
        """Number of allgathers that this rank has begun."""

    def begin(
        self, name: str, data: bytes, now: float, then: Callable[[Sequence[bytes]], None], *, kept: bool
    ) -> Gathering:
        """Create the next allgather. now: the time (perf_counter). kept: whether to store the allgather for ranks that
        need its values after a loss of ranks."""
        gathering = Gathering(name, data, self.count, now, then)
        self.count += 1
        if kept:
            self.newest = [*self.newest[-KEPT:], gathering]
        return gathering

    @property
    def completed(self) -> int:
        """Number of allgathers that are complete before the first incomplete one."""
        return min((g.number for g in self.newest if not g.complete), default=self.count)

    def results(self, first: int) -> dict[int, list[bytes]]:
        """Return all ranks' bytes of each complete allgather from number `first` on."""
        return {g.number: list(g.lanes) for g in self.newest if g.complete and g.number >= first}

    def settle(self, known: Mapping[int, Sequence[bytes]], completed: int) -> None:
        """Complete the allgathers with numbers below `completed` by the results of another rank."""
        for gathering in self.newest:
            if not gathering.complete and gathering.number < completed:
                gathering.settle(known[gathering.number])

    def abandon(self, since: float) -> None:
        """Note that this rank does without incomplete allgathers that were begun after the time `since`
        (perf_counter)."""
        for gathering in self.newest:
            gathering.abandoned |= not gathering.complete and gathering.began > since

    def undo(self, since: float) -> None:
        """Forget incomplete allgathers that were abandoned, or begun after the time `since` (perf_counter), so that
        they can begin again."""
        redone = [g for g in self.newest if not g.complete and (g.abandoned or g.began > since)]
        self.newest = [g for g in self.newest if g not in redone]
        self.count -= len(redone)
