"""Predicts from the ranks' measured times how fast each way trains, and chooses one.

C: seconds to compute a step. A: seconds of a step outside DADT. P: CPU seconds of a rank during C. k: CPU cores per
rank. For each compression, S: seconds of a synchronous step without overlap. X: seconds of its exchange. p: CPU seconds
of its exchange. The predictions are those of `dadt bench advise`, which predicts X as well:

    sync     S, less the part of X that is hidden: backward passes hide all buckets but the last
    pipe     max(C, X)
    local    (H A + max(0, X - h A)) / H: of H steps between two exchanges h hide one

No prediction is below the CPU seconds divided by the cores: (P + p) / k, with `local` (P + p / H) / k. S also contains
the wait for the slowest rank of each step, which neither C nor X has. The prediction for `pipe` is a lower bound:
predicting weights adds time, which shows only when `pipe` runs. Momentum is not sent before the choice: its times
follow from those of int8 and int4 by their bytes.

What a way costs in loss counts as the steps that would make up for it: a step of a way that ends c above `sync` counts
as 2^(c/d) steps, if twice as many steps end d lower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dadt.algorithms.auto.ways import WIRE, Choice
from dadt.comm.compression import OF_MOMENTUM

CLOSE = 1.05
"""Ways that take at most this factor times the time of the fastest count as equally fast; of these, the one that costs
least loss is chosen."""
_FORWARD = 1 / 3
"""Share of a step's computing time that is spent before the backward pass."""


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
    """Number of steps of a round of `local`, for ways that leave it to the user."""
    overlap: int | None = None
    """Number of steps that the user lets run while `local` exchanges weights in the background; None for half a round,
    or a whole one with several fragments, in ways that do not wait for each mean."""
    fragments: int = 1

    def hidden(self, way: Choice) -> int:
        """Return the number of steps that run behind an exchange of `local`."""
        every = way.every or self.sync_every
        if self.overlap is not None:
            return min(self.overlap, every)
        if way.at_once:
            return 0
        return every if self.fragments > 1 else (every + 1) // 2


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


def seconds(way: Choice, times: Times, shape: Shape) -> float:
    """Return the predicted seconds of a training step."""
    exchange, handling, every = times.exchange[way.compression], times.handling[way.compression], 1
    if way.algorithm == "sync":
        hidden = times.compute + exchange - _overlapping(times, exchange, shape.shares)
        found = times.step[way.compression] - hidden
    elif way.algorithm == "pipe":
        found = max(times.compute, exchange)
    else:
        every = way.every or shape.sync_every
        found = times.alone + max(0.0, exchange - shape.hidden(way) * times.alone) / every
    return max(found, (times.processor + handling / every) / times.cores)


def completed(times: Times) -> Times:
    """Return the times with those of momentum added, if int8 and int4 were measured, and with exchanges that take at
    least as long as their bytes need."""
    exchange, handling = _completed(times.exchange), _with_momentum(times.handling)
    step = dict(times.step)
    for name, each in exchange.items():
        measured = name if name in times.step else "int4"
        step[name] = times.step[measured] + each - times.exchange[measured]
    return replace(times, step=step, exchange=exchange, handling=handling)


def _completed(exchange: Mapping[str, float]) -> dict[str, float]:
    # Bytes that fit into the buffers of a slow link leave at once, so that few of them look faster than they are.
    most = exchange.get("none", 0.0)
    every = {name: max(each, most * WIRE.get(name, 0.0)) for name, each in exchange.items()}
    return {name: max(each, most * WIRE.get(name, 0.0)) for name, each in _with_momentum(every).items()}


def _with_momentum(found: Mapping[str, float]) -> dict[str, float]:
    """Return the times with those of momentum, which follow by their bytes from those of int8 and int4, or of int4
    where nothing else was tried."""
    if found.keys() == {"int4"}:
        return {**found, **{name: found["int4"] * WIRE[name] / WIRE["int4"] for name in OF_MOMENTUM}}
    if not {"int8", "int4"} <= found.keys():
        return dict(found)
    each = max(0.0, found["int8"] - found["int4"]) / (WIRE["int8"] - WIRE["int4"])
    more = {name: found["int4"] - each * (WIRE["int4"] - WIRE[name]) for name in OF_MOMENTUM}
    return {**found, **{name: max(0.0, seconds) for name, seconds in more.items()}}


def best(found: Mapping[Choice, float], costs: Mapping[Choice, float], doubling: float) -> Choice:
    """Return the way to train with. found: predicted seconds of a step. costs: the loss that each way costs; both begin
    with the way that changes training least. doubling: loss by which twice as many steps end lower."""
    to_loss = {way: each * 2 ** (costs[way] / doubling) for way, each in found.items()}
    enough = CLOSE * min(to_loss.values())
    return min((way for way in found if to_loss[way] <= enough), key=costs.__getitem__)


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
