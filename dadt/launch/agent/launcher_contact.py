"""Decides whether an agent's launcher is still there."""

from __future__ import annotations

from dadt.control.absence import Absence

FIRST_SECONDS = 60.0
"""Seconds of silence after which the launcher counts as lost before its first order. This order sets the number of
seconds from then on."""


class LauncherContact:
    """Tracks when the launcher was last heard. It sends a heartbeat several times within `patience` seconds."""

    def __init__(self, now: float) -> None:
        self.patience = FIRST_SECONDS
        """Seconds of silence after which the launcher counts as lost."""
        self._heard = now
        self._absence = Absence(now)

    def hear(self, now: float) -> None:
        """Record that the launcher has sent something."""
        self._heard = now

    def is_lost(self, now: float) -> bool:
        """Whether the launcher has been silent for too long. Call regularly, after all that has come is read: time in
        which this process itself did not run (stopped, or its machine asleep) does not count as silence of the
        launcher, which may have slept as well."""
        if self._absence.has_ended(self.patience, now):
            self._heard = now
        return now - self._heard > self.patience
