"""How many steps a time is, by the slowest rank: what ranks tell each other of it comes beside training."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from dadt.comm import plain
from dadt.train.runtime import Runtime

if TYPE_CHECKING:
    from dadt.train.gathering import Gathering

MEASURED = 20
"""Steps by whose time the first snapshot is chosen."""
LOOK_AFTER = 2
"""Steps after which what ranks have told each other has come, where each step waits for all."""


class Pace:
    """Of one job, whose snapshots come after a time. What it finds is the same on all ranks."""

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime, self._seconds = runtime, seconds
        self._times: deque[float] = deque(maxlen=MEASURED)
        self.first = MEASURED
        """The step behind which all ranks measure without being asked."""
        self._asked: tuple[int, float, Gathering | None] | None = None
        """The step, what a step has taken on this rank, and on the others where there are any."""

    def stepped(self) -> None:
        self._times.append(perf_counter())
        if self._runtime.step == self.first:
            self.ask()

    def ask(self) -> None:
        """All ranks call it behind the same step."""
        r = self._runtime
        took = (self._times[-1] - self._times[0]) / max(len(self._times) - 1, 1)
        text = plain.encode(took, "the time of a step")
        self._asked = r.step, took, None if r.alone else r.allgather(f"time of a step at {r.step}", text)

    def told(self, *, at_once: bool) -> tuple[int, int] | None:
        """The steps that the time is, and the step of the next snapshot, once all ranks must have told; at_once: it may
        be waited for."""
        r = self._runtime
        look = LOOK_AFTER if all(a.algorithm.identical for a in r.attachments) else 2 * r.config.sync_every
        if self._asked is None or (r.step < self._asked[0] + look and not at_once):
            return None
        (step, slowest, others), self._asked = self._asked, None
        if others is not None:
            r.wait(others)
            slowest = max(map(plain.decode, others.lanes))
        steps = max(1, round(self._seconds / max(slowest, 1e-6)))
        return steps, max(step + steps, step + look + 1)
