"""Gradients that blow up: noticed by their norm, which stays far above what it was."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

FACTOR = 20.0
"""A norm above this many times the usual one is too large. Single steps of a healthy training reach it."""
PATIENCE = 5
"""Steps in a row with too large a norm, after which gradients count as blowing up."""
_LEAST = 20
_MOST = 50
_DRIFT = 1.01
"""The share by which the usual norm follows in a step: a training by itself is slower, a divergence faster."""


class Divergence:
    """Knows the usual norm of the gradients, and counts those that are far above it."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_MOST)
        self.usual = 0.0
        """Median norm of the steps before the delay, which follows slowly; 0 as long as it is not known."""
        self._above = 0

    def learn(self, norm: float) -> None:
        """Note a norm that is as it should be."""
        if math.isfinite(norm) and norm > 0:
            self._norms.append(norm)

    def state(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "usual": self.usual, "above": self._above}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._norms = deque(state["norms"], _MOST)
        self.usual, self._above = state["usual"], state["above"]

    def see(self, norm: float) -> bool:
        """Note a norm that may be too large. Returns whether gradients are blowing up."""
        if not self.usual:
            if len(self._norms) < _LEAST:
                self.learn(norm)
                return False
            self.usual = statistics.median(self._norms)
        if math.isfinite(norm) and norm <= FACTOR * self.usual:
            self._above = 0
            if norm > 0:
                self.usual = min(max(norm, self.usual / _DRIFT), self.usual * _DRIFT)
            return False
        self._above += 1
        self.usual *= _DRIFT
        return self._above >= PATIENCE
