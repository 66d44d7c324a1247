"""Computes means of paired differences with 95 % intervals (Student's t)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.page import spread

QUANTILES = [
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
]
"""Student's t at 97.5 % with 1, 2, ... degrees of freedom. Beyond 30 the last value is used, which is slightly too
large."""


class MeanInterval(NamedTuple):
    mean: float
    low: float
    high: float
    pairs: int


def interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of the values and its 95 % interval, which is infinite for a single value."""
    count = len(values)
    mean = statistics.fmean(values)
    if count < 2:
        return MeanInterval(mean, float("-inf"), float("inf"), count)
    quantile = QUANTILES[min(count - 1, len(QUANTILES)) - 1]
    half = quantile * statistics.stdev(values) / count**0.5
    return MeanInterval(mean, mean - half, mean + half, count)


def shown(found: MeanInterval, form: str = ".4f") -> str:
    """Return the mean as text, with the interval if there are several values."""
    return spread(*found[:3], form) if found.pairs > 1 else f"{found.mean:{form}}"
