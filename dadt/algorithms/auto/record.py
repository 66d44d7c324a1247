"""Times that one rank measures in its synchronous steps, for `auto`."""

from __future__ import annotations

import statistics
from time import perf_counter, process_time
from typing import Any

from dadt.algorithms.auto.choice import Times


class StepRecord:
    """Times that one rank measures in its synchronous steps."""

    def __init__(self) -> None:
        self.steps = 0
        self._processor: list[float] = []
        self._moving: dict[str, list[float]] = {}
        self._handling: dict[str, list[float]] = {}
        self._step: dict[str, list[float]] = {}
        self._since = self._ended = 0.0
        """CPU time of the process when the last exchange ended or the current one began, and wall-clock time when the
        last exchange ended, in seconds."""

    def computed(self) -> None:
        """Record the CPU time of a step's computing. Called when its gradients are computed, before their exchange."""
        now = process_time()
        if self._since:
            self._processor.append(now - self._since)
        self._since = now

    def exchanged(self, compression: str, moving: float) -> None:
        now, clock = process_time(), perf_counter()
        if self._ended:
            self._step.setdefault(compression, []).append(clock - self._ended)
        self._ended = clock
        self._moving.setdefault(compression, []).append(moving)
        self._handling.setdefault(compression, []).append(now - self._since)
        self._since = now
        self.steps += 1

    @property
    def link(self) -> tuple[float, float]:
        """The seconds of the first exchange, which is uncompressed, and those computed since it ended."""
        return self._moving["none"][0], perf_counter() - self._ended

    def moving(self, compression: str) -> list[float]:
        """Return the seconds for which each exchange so far with this compression transferred data."""
        return self._moving.get(compression, [])

    def times(self, compute: float, alone: float, cores: float, *, may_part: bool, backwards: int) -> Times:
        processor = statistics.median(self._processor) if self._processor else 0.0
        step, moving, handling = (
            # A compression's first exchange is slow, as it allocates buffers.
            {name: statistics.median(each[1:] or each) for name, each in found.items() if name in self._step}
            for found in (self._step, self._moving, self._handling)
        )
        return Times(compute, alone, processor, cores, step, moving, handling, may_part, backwards)

    def state(self) -> dict[str, Any]:
        found = {"step": self._step, "moving": self._moving, "handling": self._handling}
        copied = {key: {name: list(each) for name, each in times.items()} for key, times in found.items()}
        return {"steps": self.steps, "processor": list(self._processor), **copied}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps, self._processor = state["steps"], list(state["processor"])
        self._step, self._moving, self._handling = (
            {name: list(each) for name, each in state[key].items()} for key in ("step", "moving", "handling")
        )
