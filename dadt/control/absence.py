"""Notices that this process itself did not run for a while, so that it does not mistake its own absence for the silence
of other processes."""

from __future__ import annotations


class Absence:
    """Time in which this process did not run: it was stopped or blocked, or its machine was asleep."""

    def __init__(self, now: float) -> None:
        self._present_at = now

    def has_ended(self, patience: float, now: float) -> bool:
        """Whether this process has been away since the last call for so long that the silence of others in this time
        does not count. Call regularly. patience: seconds after which others count as silent."""
        return self.lasted(patience, now) > 0

    def lasted(self, patience: float, now: float) -> float:
        """Return for how many seconds this process was away since the last call; 0 if for less than half of `patience`.
        Call regularly."""
        away, self._present_at = now - self._present_at, now
        return away if away > patience / 2 else 0.0


class Deadline:
    """A time limit for the answers of other processes. Time in which this process itself was away does not count."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._absence = Absence(now)
        self.at = now + seconds
        """Time (time.monotonic) at which the limit is reached."""
        self.look_at = now
        """Time by which `turn` has to be called again at the latest."""
        self.turn(now)

    def turn(self, now: float) -> float:
        """Move the limit by the time in which this process was away, and return the seconds of that time. Call
        regularly."""
        away = self._absence.lasted(self._seconds, now)
        self.at += away
        self.look_at = min(self.at, now + self._seconds / 4)
        return away

    def hasten(self, at: float) -> None:
        """Move the limit forward to this time, unless it is earlier already."""
        self.at, self.look_at = min(self.at, at), min(self.look_at, at)
