"""Detects that this process itself did not run for a while, so that it does not mistake this pause for silence of other
processes."""

from __future__ import annotations


class Absence:
    """Detects that this process did not run for some time, because it was stopped or blocked, or its machine was
    asleep."""

    def __init__(self, now: float) -> None:
        self._present_at = now

    def has_ended(self, patience: float, now: float) -> bool:
        """Return whether this process was stopped or blocked since the last call for so long that silence of other
        processes in this time means nothing. Call regularly. patience: seconds of silence after which another process
        counts as silent."""
        return self.lasted(patience, now) > 0

    def lasted(self, patience: float, now: float) -> float:
        """Return the seconds since the last call if they exceed half of `patience`, since this process then was stopped
        or blocked; otherwise return 0. Call regularly."""
        away, self._present_at = now - self._present_at, now
        return away if away > patience / 2 else 0.0


class Deadline:
    """A time limit for the answers of other processes. It is postponed by the time in which this process itself did not
    run."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._absence = Absence(now)
        self.at = now + seconds
        """Time (time.monotonic) at which the limit is reached."""
        self.look_at = now
        """Time by which `turn` has to be called again at the latest."""
        self.turn(now)

    def turn(self, now: float) -> float:
        """Postpone the limit by the time in which this process did not run since the last call, and return the seconds
        of that time. Call regularly."""
        away = self._absence.lasted(self._seconds, now)
        self.at += away
        self.look_at = min(self.at, now + self._seconds / 4)
        return away

    def hasten(self, at: float) -> None:
        """Set the limit to time `at`, unless it is earlier already."""
        self.at, self.look_at = min(self.at, at), min(self.look_at, at)
