"""Detects diverging training by a gradient norm that stays far above its usual value."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

FACTOR = 20.0
"""A gradient norm above this many times the usual norm is too large. Single steps of a healthy training may exceed
it."""
PATIENCE = 5
"""Number of successive steps with too large a norm after which the gradients count as diverging."""
_LEAST = 20
_MOST = 50
_DRIFT = 1.01
"""Factor by which the usual norm may change per step: the norm changes more slowly in healthy training, and faster in a
divergence."""


class Divergence:
    """Learns the usual norm of the gradients, and counts successive norms that are far above the usual one."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_MOST)
        self.usual = 0.0
        """The usual gradient norm: at first the median of the synchronous steps, later slowly adapted; 0 while unknown.
        """
        self._above = 0

    def learn(self, norm: float) -> None:
        """Record a norm from a step that counts as healthy."""
        if math.isfinite(norm) and norm > 0:
            self._norms.append(norm)

    def state(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "usual": self.usual, "above": self._above}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the values that the method `state` returned for a checkpoint."""
        self._norms = deque(state["norms"], _MOST)
        self.usual, self._above = state["usual"], state["above"]

    def see(self, norm: float) -> bool:
        """Check the norm of a step's gradients, which may be too large. Returns whether the gradients are diverging."""
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
