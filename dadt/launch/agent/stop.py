"""Stops a host's workers in phases: first they may end by themselves, then they get SIGTERM, and finally SIGKILL goes
to all processes of the job that are left on the host."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.launch.agent.actions import AgentOutbox, KillAll, TerminateAll
from dadt.launch.ending.processes import TRACKER_SECONDS

KILL_SECONDS = 3.0


class Stop:
    """The process of stopping a host's workers, which lasts until `finished` is set."""

    def __init__(self, natural: float, grace: float, outbox: AgentOutbox, now: float) -> None:
        """natural: seconds that processes may take to end by themselves before SIGTERM is sent. grace: seconds from
        SIGTERM to SIGKILL."""
        self._grace = grace
        self._outbox = outbox
        self._natural_end = now + natural
        self._kill_at = 0.0
        self.natural = natural > 0
        self.signalled = False
        """Whether SIGTERM was sent. If a worker ends after that, its end counts as caused by the stop."""
        self.finished = False
        self.stuck: Sequence[int] = ()
        """Processes that did not die of SIGKILL."""

    def end_naturally_in(self, seconds: float, now: float) -> None:
        """Allow processes that still run at most `seconds` more seconds to end by themselves."""
        self._natural_end = min(self._natural_end, now + seconds)

    def hasten(self, grace: float, now: float) -> None:
        self._grace = min(self._grace, grace)
        if self.signalled:
            self._kill_at = min(self._kill_at, now + grace)

    def advance(self, left: Sequence[int], now: float) -> None:
        """Do what is due at time `now`: send SIGTERM, send SIGKILL, or finish. left: processes of the job that still
        run on this host."""
        if not left:
            self.finished = True
        elif not self.signalled:
            if now >= self._natural_end:
                self.signalled, self.natural = True, False
                self._kill_at = now + self._grace
                self._outbox.put(TerminateAll(left))
        elif now >= self._kill_at:
            self._outbox.put(KillAll(left, now < self._kill_at + TRACKER_SECONDS))
            if now >= self._kill_at + KILL_SECONDS:
                self.stuck = left
                self.finished = True
