"""Which ranks wait for others: the one place where every wait counts, of whatever kind.

A rank that waits in an exchange, in a library that connects it, for a file or for a new worker asks every few seconds
where the others are. One that waits at the launcher has asked a question which is answered once all have come.
"""

from __future__ import annotations

from dataclasses import dataclass

from dadt.control.frame import Frame
from dadt.launch.actions import Reply

ASKED_SECONDS = 8.0
"""A rank counts as waiting for this long after it asked for the others, which it does every few seconds."""
SAID_SECONDS = 4.0
"""Where one rank waits, any other that does so as well has said it within this time."""


@dataclass(slots=True)
class Waiting:
    """What one rank waits for."""

    asked: float = float("-inf")
    """Time (time.monotonic) at which it last asked where the others are."""
    acted: float = float("-inf")
    """Time at which it last asked anything, or was answered: a sign of life beside its steps."""
    starts: bool = False
    """It waits for its first connection with the others, which has a deadline of its own."""
    _open: int = 0
    """The number of its questions that wait for others."""

    def ask(self, starts: bool, now: float) -> None:
        """Note that the rank asks where the others are."""
        self.asked = self.acted = now
        self.starts = starts

    def begin(self, reply: Reply, starts: bool, now: float) -> Reply:
        """Note that the rank asks what is answered once others have done their part. Returns what answers it."""
        self._open += 1
        self.acted, self.starts = now, starts

        def answer(frame: Frame, now: float) -> None:
            self._open -= 1
            self.acted = now
            reply(frame, now)

        return answer

    def lasts(self, seen: float, now: float) -> bool:
        """Whether it waits. seen: when it made its last step."""
        recent = now - self.asked < ASKED_SECONDS
        return self._open > 0 or (recent and self.asked > seen and self.asked >= self.acted)
