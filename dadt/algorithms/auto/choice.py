"""Predicts from the ranks' measured times which algorithm and compression train fastest, among those shown to cost no
accuracy.

C: seconds to compute a step. A: seconds of a step outside DADT. P: CPU seconds of a rank during C. k: CPU cores per
rank. For each compression, S: seconds of a synchronous step without overlap. X: seconds of its exchange. p: CPU seconds
of its exchange. The predictions are those of `dadt bench advise`, which predicts X as well:

    sync     S, less the part of X that is hidden: backward passes hide all buckets but the last
    pipe     max(C, X)
    local    (H A + max(0, X - h A)) / H: of H steps between two exchanges h hide one

No prediction is below the CPU seconds divided by the cores: (P + p) / k, with `local` (P + p / H) / k. S also contains
the wait for the slowest rank of each step, which neither C nor X has. The prediction for `pipe` is a lower bound:
predicting weights adds time, which shows only when `pipe` runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

CLOSE = 1.05
"""Choices that take at most this factor times the time of the fastest count as equally fast; of these, the one that
changes training least is chosen."""
_FORWARD = 1 / 3
"""Share of a step's computing time that is spent before the backward pass."""


class Choice(NamedTuple):
    algorithm: str
    compression: str

    def __str__(self) -> str:
        return self.algorithm if self.compression == "none" else f"{self.algorithm} with {self.compression}"


class HarmlessSettings(NamedTuple):
    """The settings that cost one kind of optimizer no accuracy."""

    compressions: tuple[str, ...]
    sync_every: int
    """Largest number of steps between two averages of `local` without loss of accuracy; 0 if `local` always loses
    accuracy."""
    synchronous: tuple[str, ...] = ()
    """Further compressions that cost no accuracy with `sync`, but do with late averages."""


SHOWN = {
    "sgd": HarmlessSettings(("none", "bf16", "int8", "int4"), 32),
    "adam": HarmlessSettings(("none", "int8"), 0, ("int4",)),
}
"""Settings, by kind of optimizer, that meet the accuracy target on all models in docs/results/accuracy.md with four
workers. With Adam, bf16, and late averages with int4, miss the target on the GPT by a little, and `local` misses it on
the GPT and the MLP by far. (With SGD, DiLoCo's outer optimizer misses the target.)
"""


@dataclass(frozen=True, slots=True)
class Times:
    """One rank's median times over its synchronous steps; `slowest` returns the maximum of each over all ranks."""

    compute: float
    """Seconds of a step without waiting for other ranks."""
    alone: float
    """Seconds of a step without the time spent in DADT's hooks."""
    processor: float
    """Processor seconds of a step before its exchange, over all threads of the rank."""
    cores: float
    """Number of the host's processor cores divided by its number of ranks."""
    step: Mapping[str, float]
    """Seconds of a whole synchronous step, by compression."""
    exchange: Mapping[str, float]
    """Seconds in which an exchange moves bytes, by compression."""
    handling: Mapping[str, float]
    """Processor seconds that the rank spends in an exchange, by compression."""
    may_part: bool
    """Whether the script allows different weights on each rank, as `local` needs."""
    backwards: int = 1
    """Number of backward passes in a step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers that are the same on all ranks, so that they need not be exchanged."""

    shares: Sequence[float]
    """For each bucket, its share of all gradient bytes, in the order in which buckets are sent."""
    sync_every: int
    hidden: int
    """Number of training steps that run while `local` exchanges weights in the background."""


def slowest(every: Sequence[Times]) -> Times:
    """Return the maximum of each time over all ranks, because in a synchronous step all ranks wait for the slowest."""
    return Times(
        compute=max(each.compute for each in every),
        alone=max(each.alone for each in every),
        processor=max(each.processor for each in every),
        cores=min(each.cores for each in every),
        step=_most([each.step for each in every]),
        exchange=_most([each.exchange for each in every]),
        handling=_most([each.handling for each in every]),
        may_part=all(each.may_part for each in every),
        backwards=max(each.backwards for each in every),
    )


def ways(algorithms: Sequence[str], compressions: Sequence[str]) -> list[Choice]:
    """Return all pairs of an algorithm and a compression, in the given order. Pass those that change training least
    first."""
    return [Choice(*pair) for pair in product(algorithms, compressions)]


def seconds(way: Choice, times: Times, shape: Shape) -> float:
    """Return the predicted seconds of a training step with this choice of algorithm and compression."""
    exchange, handling, every = times.exchange[way.compression], times.handling[way.compression], 1
    if way.algorithm == "sync":
        hidden = times.compute + exchange - _overlapping(times, exchange, shape.shares)
        found = times.step[way.compression] - hidden
    elif way.algorithm == "pipe":
        found = max(times.compute, exchange)
    else:
        every = shape.sync_every
        found = times.alone + max(0.0, exchange - shape.hidden * times.alone) / every
    return max(found, (times.processor + handling / every) / times.cores)


def best(found: Mapping[Choice, float]) -> Choice:
    """Return the choice to train with. found: predicted seconds of a step for each choice, beginning with the choice
    that changes training least."""
    enough = CLOSE * min(found.values())
    return next(way for way, each in found.items() if each <= enough)


def _overlapping(times: Times, exchange: float, shares: Sequence[float]) -> float:
    done, complete, backward = 0.0, 0.0, (1 - _FORWARD) / times.backwards
    for share in shares:
        complete += share
        # The last bucket is sent only at the optimizer's step, so it is ready when all computing is done.
        ready = times.compute * (1 - backward * (1 - complete)) if complete < 1 - 1e-9 else times.compute
        done = max(done, ready) + exchange * share
    return done


def _most(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    def both() -> Iterator[str]:
        return (name for name in every[0] if all(name in each for each in every))

    return {name: max(each[name] for each in every) for name in both()}
