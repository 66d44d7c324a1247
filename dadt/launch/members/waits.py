"""Tracks which ranks wait for other ranks, by any kind of wait.

A rank that waits in an exchange, for a library to connect it, for a file, or for a new worker asks the launcher every
few seconds about the state of the other ranks. A rank that waits in the launcher has asked a question, which is
answered once all ranks have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

from dadt.control.frame import Frame
from dadt.launch.actions import Reply

ASKED_SECONDS = 8.0
"""Seconds for which a rank counts as waiting after it asked about the state of the other ranks; while it waits, it asks
every few seconds."""
SAID_SECONDS = 4.0
"""Seconds within which a rank that begins to wait has reported this to the launcher."""


@dataclass(slots=True)
class Waiting:
    """Whether one rank waits for others, and since when."""

    asked: float = float("-inf")
    """Time (time.monotonic) at which the rank last asked about the state of the other ranks."""
    acted: float = float("-inf")
    """Time (time.monotonic) at which the rank last asked anything or received an answer: a sign of life in addition to
    its steps."""
    starts: bool = False
    """Whether the rank waits for its first connection with the other ranks, which has a deadline of its own."""
    _open: int = 0
    """Number of the rank's unanswered questions that wait for other ranks."""

    def ask(self, starts: bool, now: float) -> None:
        """Record that the rank has asked about the state of the other ranks. starts: whether it waits for its first
        connection."""
        self.asked = self.acted = now
        self.starts = starts

    def begin(self, reply: Reply, starts: bool, now: float) -> Reply:
        """Record that the rank asked a question that is answered once other ranks have done their part. Returns a reply
        function to use instead of `reply`, which also records the end of the wait."""
        self._open += 1
        self.acted, self.starts = now, starts

        def answer(frame: Frame, now: float) -> None:
            self._open -= 1
            self.acted = now
            reply(frame, now)

        return answer

    def lasts(self, seen: float, now: float) -> bool:
        """Return whether the rank waits for other ranks. seen: time (time.monotonic) of its last step."""
        recent = now - self.asked < ASKED_SECONDS
        return self._open > 0 or (recent and self.asked > seen and self.asked >= self.acted)
