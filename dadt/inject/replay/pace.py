"""Converts the time between two snapshots to a number of steps, by the step time of the slowest rank. Ranks exchange
their step times in the background."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from dadt.comm import plain
from dadt.config.check import round_steps
from dadt.errors import PeerLost
from dadt.train.runtime import Runtime

if TYPE_CHECKING:
    from dadt.train.loss.gathering import Gathering

MEASURED = 20
"""Number of steps that are timed before the first snapshot is scheduled."""
LOOK_AFTER = 2
"""Number of steps after which the step times of all ranks have arrived, if ranks wait for each other in each step."""


class Pace:
    """Converts the seconds between a job's snapshots to a number of steps, which is the same on all ranks."""

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime, self._seconds = runtime, seconds
        self._times: deque[float] = deque(maxlen=MEASURED)
        self.first = MEASURED
        """The step after which all ranks exchange their step times for the first time."""
        self._asked: tuple[int, float, Gathering | None] | None = None
        """The exchange of step times in progress: its step, this rank's seconds per step, and the gathering of the
        other ranks' times (None for a single rank). None if no exchange is in progress."""

    def stepped(self) -> None:
        self._times.append(perf_counter())
        if self._runtime.ranks.step == self.first:
            self.ask()

    def ask(self) -> None:
        """Begin to exchange the seconds per step with all ranks, which call this after the same step."""
        ranks = self._runtime.ranks
        took = (self._times[-1] - self._times[0]) / max(len(self._times) - 1, 1)
        text = plain.encode(took, "the time of a step")
        self._asked = ranks.step, took, None if ranks.alone else self._gather(text)

    def _gather(self, text: bytes) -> Gathering:
        """Gather from all ranks of the job. If ranks are lost meanwhile, connect anew, and gather from those that are
        left, as all of these do."""
        ranks = self._runtime.ranks
        while True:
            try:
                return ranks.gather_from_all(f"time of a step at {ranks.step}", text)
            except PeerLost as error:
                ranks.regroup(error)

    def told(self, *, at_once: bool) -> tuple[int, int] | None:
        """Return the number of steps between two snapshots, and the step of the next one. Return None if no exchange is
        in progress, or the other ranks' times may not have arrived. at_once: wait for these times."""
        ranks = self._runtime.ranks
        identical = all(a.algorithm.identical for a in self._runtime.attachments)
        look = LOOK_AFTER if identical else 2 * round_steps(ranks.config.sync_every)
        if self._asked is None or (ranks.step < self._asked[0] + look and not at_once):
            return None
        (step, slowest, others), self._asked = self._asked, None
        if others is not None:
            ranks.wait(others)
            slowest = max(map(plain.decode, others.lanes))
        steps = max(1, round(self._seconds / max(slowest, 1e-6)))
        return steps, max(step + steps, step + look + 1)
