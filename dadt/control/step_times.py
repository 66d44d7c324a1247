"""A histogram of a rank's step times, whose size stays small however long a job runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PER_DOUBLING = 8
"""Number of bins between a time and twice that time. Each bin is thus 9 % wider than the previous one."""


def bound(size: int) -> float:
    """Return the lower bound of a bin in seconds. size: number of the bin; bins below 1 s have negative numbers."""
    return float(2.0 ** (size / PER_DOUBLING))


class StepTimes:
    """Histogram of the times from the end of each step to the end of the next, including whatever the script does in
    between."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._seconds = 0.0
        self.last = 0.0
        """Time at which the last step ended, in seconds of a monotonic clock."""

    def stepped(self, now: float) -> None:
        """Record the end of a step. now: seconds of a monotonic clock."""
        seconds = now - self.last
        if self.last and seconds > 0.0:
            size = math.floor(PER_DOUBLING * math.log2(seconds))
            self._counts[size] = self._counts.get(size, 0) + 1
            self._seconds += seconds
        self.last = now

    def describe(self) -> Mapping[str, Any]:
        """Return {counts: {bin number: steps}, seconds: sum of all step times}."""
        return {"counts": dict(self._counts), "seconds": self._seconds}
