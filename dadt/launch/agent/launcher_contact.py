"""Decides whether an agent's launcher is still there."""

from __future__ import annotations

from dadt.control.absence import Absence

FIRST_SECONDS = 60.0
"""Seconds of silence after which the launcher counts as lost, until its first order, which contains the number that
applies from then on."""


class LauncherContact:
    """Tracks when the launcher last sent something. The launcher sends a heartbeat several times within `patience`
    seconds."""

    def __init__(self, now: float) -> None:
        self.patience = FIRST_SECONDS
        """Seconds of silence after which the launcher counts as lost."""
        self._heard = now
        self._absence = Absence(now)

    def hear(self, now: float) -> None:
        """Record that the launcher has sent something."""
        self._heard = now

    def is_lost(self, now: float) -> bool:
        """Return whether the launcher has been silent for too long. Call this regularly, after everything received was
        read. Time in which this process itself did not run, because it was stopped or its machine was asleep, does not
        count as silence of the launcher, which may have been asleep as well."""
        if self._absence.has_ended(self.patience, now):
            self._heard = now
        return now - self._heard > self.patience
