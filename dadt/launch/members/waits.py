"""Tracks which ranks wait for other ranks, in whichever way they wait.

A rank that waits in an exchange, for a library to connect it, for a file, or for a new worker asks the launcher every
few seconds about the state of the other ranks. A rank that exchanges values through the launcher waits for the
launcher's answer, which comes once all ranks have sent their values.
"""

from __future__ import annotations

from dataclasses import dataclass

from dadt.control.frame import Frame
from dadt.launch.actions import Reply

ASKED_SECONDS = 8.0
"""Seconds for which a rank counts as waiting after it has asked about the state of the other ranks. It asks every few
seconds as long as it waits."""
SAID_SECONDS = 4.0
"""Seconds that may pass until a rank that begins to wait reports this to the launcher."""


@dataclass(slots=True)
class Waiting:
    """Tracks whether one rank waits for others, and since when."""

    asked: float = float("-inf")
    """Time (time.monotonic) at which the rank last asked about the state of the other ranks."""
    acted: float = float("-inf")
    """Time (time.monotonic) at which the rank last asked a question or received an answer, which is a sign of life in
    addition to its steps."""
    starts: bool = False
    """Whether the rank waits for its first connection with the other ranks, which has a deadline of its own."""
    _connected: bool = False
    """Whether the rank has asked about the others when it no longer waited for its first connection."""
    _open: int = 0
    """Number of the rank's unanswered questions that wait for other ranks."""

    def ask(self, starts: bool, now: float) -> None:
        """Record that the rank has asked about the state of the other ranks. starts: whether it waits for its first
        connection."""
        self.asked = self.acted = now
        self.starts = starts
        self._connected |= not starts

    def begin(self, reply: Reply, starts: bool, now: float) -> Reply:
        """Record that the rank has asked a question that is answered once other ranks have done their part. Returns a
        function to call instead of `reply`, which also records the end of the wait. starts: whether the rank has made
        no step yet."""
        self._open += 1
        self.acted, self.starts = now, starts and not self._connected

        def answer(frame: Frame, now: float) -> None:
            self._open -= 1
            self.acted = now
            reply(frame, now)

        return answer

    @property
    def is_owed(self) -> bool:
        """Whether the launcher owes the rank an answer, for which other ranks have yet to do their part."""
        return self._open > 0

    @property
    def is_starting(self) -> bool:
        """Whether the rank waits for the launcher's answer at its first connection with the other ranks."""
        return self.is_owed and self.starts

    def lasts(self, seen: float, now: float) -> bool:
        """Return whether the rank waits for other ranks. seen: time (time.monotonic) of its last step."""
        recent = now - self.asked < ASKED_SECONDS
        return self.is_owed or (recent and self.asked > seen and self.asked >= self.acted)
