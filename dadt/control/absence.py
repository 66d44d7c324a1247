"""Tells when a process itself was away, so that it does not take its own absence for the silence of others."""

from __future__ import annotations


class Absence:
    """Time in which this process did not run: it was stopped or blocked, or its machine was asleep."""

    def __init__(self, now: float) -> None:
        self._present_at = now

    def has_ended(self, patience: float, now: float) -> bool:
        """Whether this process was away since the last call, for so long that nothing which it has not heard meanwhile
        counts as silence. Call regularly. patience: seconds after which others count as silent."""
        return self.lasted(patience, now) > 0

    def lasted(self, patience: float, now: float) -> float:
        """Return the seconds of that time; 0 if this process was not away for so long. Call regularly."""
        away, self._present_at = now - self._present_at, now
        return away if away > patience / 2 else 0.0


class Deadline:
    """The end of a time in which others have to answer. It is put off by the time in which this process was away."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._absence = Absence(now)
        self.at = now + seconds
        """Time (time.monotonic) at which it is over."""
        self.look_at = now
        """Time by which `turn` has to be called again at the latest."""
        self.turn(now)

    def turn(self, now: float) -> float:
        """Put the end off, if this process was away. Call regularly. Returns by how many seconds."""
        away = self._absence.lasted(self._seconds, now)
        self.at += away
        self.look_at = min(self.at, now + self._seconds / 4)
        return away

    def hasten(self, at: float) -> None:
        """Bring the end forward to this time."""
        self.at, self.look_at = min(self.at, at), min(self.look_at, at)
