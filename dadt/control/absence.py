"""Tells when a process itself was away, so that it does not take its own absence for the silence of others."""

from __future__ import annotations


class Absence:
    """Time in which this process did not run: it was stopped or blocked, or its machine was asleep."""

    def __init__(self, now: float) -> None:
        self._present_at = now

    def has_ended(self, patience: float, now: float) -> bool:
        """Whether this process was away since the last call, for so long that nothing which it has not heard meanwhile
        counts as silence. Call regularly. patience: seconds after which others count as silent."""
        away, self._present_at = now - self._present_at, now
        return away > patience / 2
