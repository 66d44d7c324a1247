"""Lists the targets for DADT's speed, and checks whether measurements reach them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.peers.measurement import CHOICES, PLACES
from dadt.algorithms.auto.choice import CLOSE
from dadt_cli.bench.ratio import Interval, ratio

DDP = ("ddp", "ddp-view")
"""Contenders that train by DDP without compression; the faster one is compared with."""
PLAIN, HOROVOD = ("plain",), ("horovod",)
BY_HAND = tuple(name for name in CHOICES.split() if name != "auto")
BARE = {"pipe": ("bare",), "pipe+bf16": ("bare-bf16",)}
"""For each contender, the one that does nothing but the same bare exchange over Gloo, whose cost is the least
possible."""
SLOW_LINKS = ("slow-link-sgd", "slow-link-adam")
"""Results of `benchmarks.convergence.slow_link` over 100 Mbit/s, as measurements of the seconds to the same loss, seed
by seed."""


class Target(NamedTuple):
    measurement: str
    others: tuple[str, ...]
    least: float
    """Least factor by which the contender has to be faster than the fastest of `others`."""
    mine: str = "pipe"
    limited: bool = False
    """Whether the others cannot be faster than the link allows."""
    forgiving: bool = False
    """The target counts as reached if the upper end of the interval reaches it."""
    optional: bool = False
    """Whether the measurement is made only if it is named, so that it may be missing."""


BF16 = ("ddp-bf16",)
TARGETS = (
    *(
        Target(*target)
        for name in ("resnet50", "resnet101")
        for target in (
            (name, DDP, 1.15),
            (name, HOROVOD, 1.55),
            (f"{name}-compressed", BF16, 1.1, "pipe+bf16"),
            (name, PLAIN, 0.85),
        )
    ),
    Target("asleep-even", DDP, 1.25),
    Target("asleep-even", PLAIN, 0.95, limited=True),
    Target("asleep-half", PLAIN, 0.98, limited=True),
    Target("shm-resnet50", PLAIN, 0.98),
    Target("shm-resnet50", DDP, 1.05),
    Target("shm-perceptron", DDP, 1.5),
    Target("shm-perceptron", DDP, 1.5, "auto"),
    Target("shm-mlp", DDP, 1.0, forgiving=True),
    Target("shm-mlp", DDP, 1.0, "auto", forgiving=True),
    Target("asleep-accumulate", DDP, 1.6),
    *(
        Target(*target)
        for name in ("hosts-4x1", "hosts-2x2")
        for target in ((name, DDP, 1.15), (name, BF16, 1.1, "pipe+bf16"), (name, PLAIN, 0.85))
    ),
    *(Target(name, ("DDP",), least, "auto") for name, least in zip(SLOW_LINKS, (12.0, 10.0), strict=True)),
    *(Target(f"auto-{place}", BY_HAND, 1 / CLOSE, "auto", optional=True) for place in PLACES),
)


def slow_link(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of that command in the form of a measurement. If a loss is not reached, its seconds are
    infinite."""
    names = seeds[0]["rows"]
    found = {name: {"seconds": [each["rows"][name]["seconds"] or math.inf for each in seeds]} for name in names}
    return {"contenders": found, "ratios": [each["ratio"] for each in seeds]}


def seconds(measurement: Mapping[str, Any], name: str) -> list[float]:
    """Return the contender's seconds in each round."""
    return list(measurement["contenders"][name]["seconds"])


def fastest(measurement: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the one of these contenders with the smallest median of seconds; None if none was measured."""
    there = [name for name in names if name in measurement["contenders"]]
    return min(there, key=lambda name: statistics.median(seconds(measurement, name)), default=None)


def speed(measurement: Mapping[str, Any], mine: str, others: Sequence[str], limited: bool = False) -> Interval | None:
    """Return how many times as fast as the fastest of the others the contender is, round by round. None if one is
    missing."""
    other = fastest(measurement, others)
    if other is None or mine not in measurement["contenders"]:
        return None
    least = measurement["exchange"] if limited else 0.0
    return ratio([max(each, least) for each in seconds(measurement, other)], seconds(measurement, mine))


def verdict(target: Target, found: Interval | None) -> str:
    if found is None:
        return "not measured"
    if found.low >= target.least or (target.forgiving and found.high >= target.least):
        return "yes"
    if found.high < target.least:
        return "no"
    return "by its median" if found.median >= target.least else "not by its median"
