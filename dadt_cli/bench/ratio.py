"""Medians and their confidence intervals, for figures measured in turn on a noisy machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dadt_cli.terminal.table import short


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its confidence interval, which contains the true median with about 95 % probability."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def interval(values: Sequence[float]) -> Interval:
    """Return the median and its interval by order statistics, which need no assumption about the distribution. With
    fewer than 6 values the interval is their range.

    Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    n = len(ordered)
    # The probability that the median lies outside the k-th smallest and k-th largest value is 2 P(binomial(n, 1/2) <
    # k). The loop finds the largest k for which this is at most 5 %.
    k = 0
    outside = 0.5**n
    while k + 1 < n / 2 and outside + math.comb(n, k + 1) * 0.5**n <= 0.025:
        k += 1
        outside += math.comb(n, k) * 0.5**n
    return Interval(statistics.median(ordered), ordered[k], ordered[n - 1 - k])


def ratio(mine: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the interval of mine / other, divided pair by pair, so that slow changes of the machine's speed cancel
    out."""
    return interval([a / b for a, b in zip(mine, other, strict=True)])


def cell(value: Interval | None, unit: float = 1.0) -> str:
    """Format a cell of a table: the median, and its interval on a second line."""
    if value is None:
        return "-"
    return f"{short(value.median * unit)}\n{short(value.low * unit)}–{short(value.high * unit)}"
