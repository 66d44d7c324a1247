"""The end of a running job: whether it has to end, how gently, and by when everything is gone."""

from __future__ import annotations

from signal import SIGINT

from dadt.control.frame import Frame
from dadt.launch.actions import Outbox
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.preemption import Preemption
from dadt.launch.monitor.watch import Watch

FAILURE_GRACE = 1.0
"""Time from SIGTERM to SIGKILL after a failure. After the user's Ctrl-C it is --grace."""
END_SECONDS = 5.0
"""How long an agent may take to end, beyond the grace."""
LEAVE_SECONDS = 30.0
"""How long a process whose script is over may take to exit, where its exit code shows why others failed."""

AGAIN_SECONDS = 2.0
"""A SIGTERM within this time is the same: batch systems send it to `dadt run` and to the script that passes it on."""


class Termination:
    """Tells the agents to stop their workers. A later reason can only hasten it."""

    def __init__(self, outbox: Outbox, watch: Watch, outcome: Outcome, grace: float, now: float) -> None:
        """grace: seconds from SIGTERM to SIGKILL when the user ends the job, and to SIGTERM after Ctrl-C."""
        self._outbox = outbox
        self._watch = watch
        self._outcome = outcome
        self._user_grace = grace
        self._fail_at = float("inf")
        """Time at which to stop everything because of the failures so far."""
        self._lets_leave = False
        """Ranks whose script is over exit before that, as long as LEAVE_SECONDS allow."""
        self._end_by = float("inf")
        """Deadline (time.monotonic) of the agents that received the order to stop; infinite before."""
        self._turned = now
        self._told = 0.0
        """Time at which `dadt run` or a host was asked to end."""
        self.grace = float("inf")
        """Seconds until SIGKILL; infinite while no order to stop was sent."""
        self.at_once = False
        """The user has asked twice for the end."""

    @property
    def goes_on(self) -> bool:
        """Whether nothing has ended the job so far."""
        return not self._outcome.signal and self.grace == self._fail_at == float("inf")

    @property
    def deadline(self) -> float:
        """When `turn` has to be called next."""
        return min(self._fail_at + (LEAVE_SECONDS if self._leaving else 0.0), self._end_by)

    def end(self, number: int, who: str, now: float) -> float:
        """End the job for the user: gently, or at once if asked again. Scripts get Ctrl-C as SIGINT, and SIGTERM
        if that does not end them; else SIGTERM. Returns the seconds until SIGKILL."""
        if self._outcome.signal:
            self._hurry(who, now)
        else:
            self._outcome.signal = number
            if number == SIGINT:
                self._stop(Frame("interrupt", {"grace": self._user_grace}), 2 * self._user_grace, who, now)
            else:
                self.terminate(self._user_grace, who, now)
            self._outbox.say(f"stopping the workers after {who} (once more: at once)")
        return self.grace

    def preempt(self, preemption: Preemption, now: float) -> None:
        """Have all workers save, and stop them gently if they have not ended after --grace seconds. Once `dadt run`
        itself has been asked to end, to be asked again means: at once."""
        before = self._outcome.preemption
        if self.goes_on:
            self._stop(Frame("preempt"), 2 * self._user_grace, preemption.who, now)
            self._outbox.say(f"{preemption.who}: workers have {self._user_grace:g} s to save (once more: at once)")
        elif before is None:
            return  # it had failed before
        elif not (before.host or preemption.host) and now > self._told + AGAIN_SECONDS:
            self._hurry(preemption.who, now)
        if before is None or before.host:
            self._outcome.preemption = preemption
            self._told = now

    def _hurry(self, who: str, now: float) -> None:
        self.at_once = True
        self.terminate(0.0, who, now)

    def terminate(self, grace: float, why: str, now: float, *, stacks: bool = False) -> None:
        """Send SIGTERM to all workers, and SIGKILL after `grace` seconds."""
        if grace < self.grace:
            self._stop(Frame("stop", {"grace": grace, "stacks": stacks}), grace, why, now)

    def fail_by(self, seconds: float, now: float, *, lets_leave: bool = False) -> None:
        """Stop everything after these seconds, as something has failed. Workers that save, or that the user has asked
        to end, keep their time. lets_leave: ranks whose script is over exit by themselves first, as one of them may be
        the cause."""
        if self._outcome.preemption is None and not self._outcome.signal:
            self._lets_leave = lets_leave and (self._lets_leave or self._fail_at == float("inf"))
            self._fail_at = min(self._fail_at, now + seconds)

    @property
    def _leaving(self) -> bool:
        members = [gauge.member for gauge in self._watch.gauges] if self._lets_leave else []
        return any(member.finished and not (member.ended or member.lost) for member in members)

    def excuse(self, now: float) -> None:
        """Give the agents more time, as nothing that they report has been read since the last turn: nobody reads the
        output."""
        self._end_by += now - self._turned
        self._turned = now

    def turn(self, now: float) -> bool:
        """Call it as time passes. Returns whether agents are overdue, so that they have to be killed."""
        self._turned = now
        if self._turned >= self._fail_at + (LEAVE_SECONDS if self._leaving else 0.0):
            self._fail_at = float("inf")
            self.terminate(FAILURE_GRACE, "a worker failed", now, stacks=True)
        return self._turned >= self._end_by

    def _stop(self, order: Frame, seconds: float, why: str, now: float) -> None:
        self.grace = seconds
        self._watch.stops(why, seconds)
        self._end_by = min(self._end_by, now + seconds + END_SECONDS)
        self._outbox.send_all(order)
