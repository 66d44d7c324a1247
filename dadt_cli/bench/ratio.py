"""Medians and their intervals, for figures measured in turn on a noisy machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dadt_cli.terminal.table import short


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and an interval that holds the true one with about 95 % probability."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def interval(values: Sequence[float]) -> Interval:
    """The median and its interval by order statistics, which assume nothing of the distribution. With fewer than 6
    values the interval is their range.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    n = len(ordered)
    # The median lies between the k-th smallest and k-th largest but for 2 P(binomial(n, 1/2) < k).
    k = 0
    outside = 0.5**n
    while k + 1 < n / 2 and outside + math.comb(n, k + 1) * 0.5**n <= 0.025:
        k += 1
        outside += math.comb(n, k) * 0.5**n
    return Interval(statistics.median(ordered), ordered[k], ordered[n - 1 - k])


def ratio(mine: Sequence[float], other: Sequence[float]) -> Interval:
    """mine / other, pair by pair: what drifts with the machine cancels."""
    return interval([a / b for a, b in zip(mine, other, strict=True)])


def cell(value: Interval | None, unit: float = 1.0) -> str:
    """The median, and on a second line the interval."""
    if value is None:
        return "-"
    return f"{short(value.median * unit)}\n{short(value.low * unit)}–{short(value.high * unit)}"
