"""Measures a rank's time: computing, exchanging, waiting."""

from __future__ import annotations

import statistics
from collections import deque
from time import perf_counter
from typing import Any, Protocol

_WINDOW = 200  # steps that medians are taken over


class RankSeconds(Protocol):
    """Seconds that one rank has spent so far, over all of its optimizers."""

    hook_seconds: float
    """Seconds in DADT's hooks around steps, waiting included."""
    waits: float
    """Seconds of waiting for exchanges."""


class Measure:
    """Clocks of one optimizer's steps, in seconds. Costs two clock readings a step."""

    def __init__(self, rank: RankSeconds) -> None:
        """rank: the seconds of all optimizers of this rank, to which this one adds."""
        self._rank = rank
        self.waited = 0.0
        self.delayed = 0
        """Gradients that were not applied in the step that computed them."""
        self.late = 0
        """Steps by which the gradients of the last step were late."""
        self.fell_back = 0
        """Times that late gradients blew up, and steps became synchronous."""
        self.not_finite = 0
        """Steps with gradients that were not finite on some rank, where somebody looked."""
        self.differed = 0
        """Times that this rank's replica was found to differ from the others'."""
        self.why = ""
        """Why steps that could be late are synchronous now, in a few words; empty if they are late, or nobody asked."""
        self.began = 0.0
        """When the first step was complete (perf_counter); what was waited until then is start-up, not training."""
        self._step_ended = 0.0
        self._waits = 0.0
        self._waited_in_step = 0.0
        self._compute: deque[float] = deque(maxlen=_WINDOW)
        self._alone: deque[float] = deque(maxlen=_WINDOW)
        self._added: deque[float] = deque(maxlen=_WINDOW)
        """Parts of steps outside and inside DADT's hooks, waiting included."""
        self._hooked = 0.0
        self._exchange: deque[float] = deque(maxlen=_WINDOW)
        self.last = 0.0

    def exchanged(self, moving: float, waited: float) -> None:
        """One exchange took `moving` to move its bytes; the training thread stood still for `waited`."""
        self._exchange.append(moving)
        self._rank.waits += waited
        self._waited_in_step += waited

    def state(self) -> dict[str, Any]:
        """The measured values, for a checkpoint within the warm-up."""
        return {"compute": list(self._compute), "exchange": list(self._exchange), "alone": list(self._alone)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._compute = deque(state["compute"], _WINDOW)
        self._exchange = deque(state["exchange"], _WINDOW)
        self._alone = deque(state.get("alone", ()), _WINDOW)

    def stepped(self) -> None:
        """A step is complete."""
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
        """Median seconds of a step without waiting."""
        return statistics.median(self._compute) if self._compute else 0.0

    @property
    def alone(self) -> float:
        """Median seconds of a step outside DADT's hooks."""
        return statistics.median(self._alone) if self._alone else 0.0

    @property
    def exchange(self) -> float:
        """Median seconds of an exchange, from the arrival of the last rank."""
        return statistics.median(self._exchange) if self._exchange else 0.0

    def verdict(self, steps: int, workers: int, exchange: float) -> str:
        """The result of the synchronous steps, and its meaning for `pipe`. exchange: seconds, of all optimizers."""
        share = ratio(self.compute, exchange)
        if share < SMALL:
            meaning = "communication is hidden; sync would be as fast here"
        elif share <= LARGE:
            meaning = f"compute hides {min(1.0, 1 / share):.0%} of communication; sync would be slower"
        else:
            meaning = f"exchanges bound the speed: {LIGHTER}"
        return f"{found(steps, self.compute, exchange)}: {self._loss(workers) or meaning}"

    def _loss(self, workers: int) -> str:
        """Says by how much one worker alone, which sees all of the data, would be faster; empty if it would not be."""
        alone, added = (statistics.median(part) if part else 0.0 for part in (self._alone, self._added))
        if alone + added <= workers * alone:
            return ""
        return (
            f"one worker alone would be faster: it would compute for {milliseconds(workers * alone)} on the {workers}"
            f" batches for which a step of {workers} workers takes {milliseconds(alone + added)}; use larger batches"
        )


SMALL = 0.67
"""Below this ratio of exchange to compute, sync hides most of the exchange in its backward."""
LARGE = 2.0
"""Above it, an exchange that one step hides bounds the speed all the same."""
LIGHTER = "send fewer bytes (--compression int8), exchange less often (--algorithm local), or use larger batches"


def ratio(compute: float, exchange: float) -> float:
    return exchange / compute if compute else 0.0


def found(steps: int, compute: float, exchange: float) -> str:
    """Says what the first `steps` synchronous steps took. compute, exchange: seconds of one."""
    return (
        f"warm-up done after {steps} steps: compute {milliseconds(compute)}, exchange {milliseconds(exchange)}"
        f" ({ratio(compute, exchange):.0%} of compute)"
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"
