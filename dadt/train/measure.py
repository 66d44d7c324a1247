"""Measures how much time a rank spends computing, exchanging and waiting."""

from __future__ import annotations

import statistics
from collections import deque
from time import perf_counter
from typing import Any, Protocol

_WINDOW = 200  # number of steps over which medians are computed


class RankSeconds(Protocol):
    """Interface of an object that counts the seconds that one rank has spent so far, summed over all of its
    optimizers."""

    hook_seconds: float
    """Seconds spent in DADT's hooks around steps, including waits."""
    waits: float
    """Seconds spent waiting for exchanges."""


class Measure:
    """Measured times of one optimizer's steps, in seconds. Each step reads the clock twice."""

    def __init__(self, rank: RankSeconds) -> None:
        """rank: sums over all optimizers of this rank, to which this object adds its own waiting times."""
        self._rank = rank
        self.waited = 0.0
        self.delayed = 0
        """Number of gradients that were not applied in the step that computed them."""
        self.late = 0
        """Number of steps by which the gradients of the last step were late."""
        self.fell_back = 0
        """Number of times that training with late gradients diverged and steps became synchronous."""
        self.not_finite = 0
        """Number of steps with NaN or infinite gradients on some rank, if gradients were checked."""
        self.differed = 0
        """Number of times that this rank's replica was found to differ from the other ranks'."""
        self.why = ""
        """Reason, in a few words, why steps do not use late gradients although the algorithm could; empty if they use
        them, or if the algorithm is synchronous."""
        self.began = 0.0
        """Time of the end of the first step (perf_counter); waits before it belong to start-up, not to training."""
        self._step_ended = 0.0
        self._waits = 0.0
        self._waited_in_step = 0.0
        self._compute: deque[float] = deque(maxlen=_WINDOW)
        self._alone: deque[float] = deque(maxlen=_WINDOW)
        self._added: deque[float] = deque(maxlen=_WINDOW)
        """Seconds that each recent step spent in DADT's hooks, including waits."""
        self._hooked = 0.0
        self._exchange: deque[float] = deque(maxlen=_WINDOW)
        self.last = 0.0

    def exchanged(self, moving: float, waited: float) -> None:
        """Record one exchange. moving: seconds in which it transferred bytes; waited: seconds for which the training
        thread waited for it."""
        self._exchange.append(moving)
        self._rank.waits += waited
        self._waited_in_step += waited

    def state(self) -> dict[str, Any]:
        """Return the measured times, for a checkpoint saved within the warm-up."""
        return {"compute": list(self._compute), "exchange": list(self._exchange), "alone": list(self._alone)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._compute = deque(state["compute"], _WINDOW)
        self._exchange = deque(state["exchange"], _WINDOW)
        self._alone = deque(state.get("alone", ()), _WINDOW)

    def stepped(self) -> None:
        """Record the times of a step that is complete."""
        now, hooked, waits = perf_counter(), self._rank.hook_seconds, self._rank.waits
        if self._step_ended:
            self._added.append(hooked - self._hooked)
            self._alone.append(now - self._step_ended - self._added[-1])
            self._compute.append(now - self._step_ended - (waits - self._waits))
            self.waited += self._waited_in_step
        else:
            self.began = now
        self._waited_in_step = 0.0
        self._step_ended = self.last = now
        self._hooked, self._waits = hooked, waits

    @property
    def compute(self) -> float:
        """Median seconds of a step without waits for exchanges."""
        return statistics.median(self._compute) if self._compute else 0.0

    @property
    def alone(self) -> float:
        """Median seconds of a step spent outside DADT's hooks."""
        return statistics.median(self._alone) if self._alone else 0.0

    @property
    def exchange(self) -> float:
        """Median seconds of an exchange, counted from the time when the last rank has begun it."""
        return statistics.median(self._exchange) if self._exchange else 0.0

    def verdict(self, steps: int, workers: int, exchange: float) -> str:
        """Return a message with the times of the synchronous warm-up steps, and with the benefit to expect from `pipe`.
        exchange: seconds of all optimizers' exchanges."""
        share = ratio(self.compute, exchange)
        if share < SMALL:
            meaning = "communication is hidden; sync would be as fast here"
        elif share <= LARGE:
            meaning = f"compute hides {min(1.0, 1 / share):.0%} of communication; sync would be slower"
        else:
            meaning = f"exchanges bound the speed: {LIGHTER}"
        return f"{found(steps, self.compute, exchange)}: {self._loss(workers) or meaning}"

    def _loss(self, workers: int) -> str:
        """Return a message that says by how much a single worker would be faster on the whole data, or an empty string
        if it would not be."""
        alone, added = (statistics.median(part) if part else 0.0 for part in (self._alone, self._added))
        if alone + added <= workers * alone:
            return ""
        return (
            f"one worker alone would be faster: it would compute for {milliseconds(workers * alone)} on the {workers}"
            f" batches for which a step of {workers} workers takes {milliseconds(alone + added)}; use larger batches"
        )


SMALL = 0.67
"""Ratio of exchange time to compute time below which algorithm `sync` hides most of the exchange behind the backward
pass."""
LARGE = 2.0
"""Ratio of exchange time to compute time above which an exchange limits the speed even if it overlaps with a whole
step."""
LIGHTER = "send fewer bytes (--compression int8), exchange less often (--algorithm local), or use larger batches"


def ratio(compute: float, exchange: float) -> float:
    return exchange / compute if compute else 0.0


def found(steps: int, compute: float, exchange: float) -> str:
    """Return a message with the times of the first `steps` synchronous steps. compute, exchange: seconds per step."""
    return (
        f"warm-up done after {steps} steps: compute {milliseconds(compute)}, exchange {milliseconds(exchange)}"
        f" ({ratio(compute, exchange):.0%} of compute)"
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"
