"""Decides whether a running job must end, how much time its workers get, and when all its processes must be gone."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGINT

from dadt.control.frame import Frame
from dadt.launch.actions import Outbox
from dadt.launch.ending.outcome import Outcome
from dadt.launch.ending.preemption import Preemption
from dadt.launch.monitor.watch import Watch

FAILURE_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL after a failure. If the user ends the job, --grace applies instead."""
END_SECONDS = 5.0
"""Seconds that an agent may take to end after the grace period of its workers is over."""
LEAVE_SECONDS = 30.0
"""Seconds that a process may take to exit after its script has ended, if its exit code may explain why other ranks
failed."""
LOSS_SECONDS = 3.0
"""If a host is lost within this many seconds after others were asked to end, the loss may be the reason: Slurm ends
all agents of a job once one has failed, and the launcher may hear of the failed one last."""

AGAIN_SECONDS = 2.0
"""Seconds within which a second SIGTERM counts as the same request as the first one. Batch systems send SIGTERM to
`dadt run` and also to the shell script around it, which may forward it."""


class Termination:
    """Ends the job by having all agents stop their workers. A later reason to end the job can only make it end
    sooner."""

    def __init__(self, outbox: Outbox, watch: Watch, outcome: Outcome, grace: float, now: float) -> None:
        """grace: seconds from SIGTERM to SIGKILL when the user ends the job; after Ctrl-C also the seconds from SIGINT
        to SIGTERM."""
        self._outbox = outbox
        self._watch = watch
        self._outcome = outcome
        self._user_grace = grace
        self._fail_at = float("inf")
        """Time (time.monotonic) at which to stop the job because of failures that were reported; infinite if there are
        none."""
        self._lets_leave = False
        """Whether the job is not stopped before ranks whose scripts have ended have exited, or LEAVE_SECONDS have
        passed."""
        self._end_by = float("inf")
        """Deadline (time.monotonic) for the agents to end; infinite until they have received the order to stop."""
        self._turned = now
        self._told = 0.0
        """Time (time.monotonic) of the last request from outside to end `dadt run` or a host."""
        self.grace = float("inf")
        """Seconds from the order to stop until SIGKILL; infinite if no order was sent yet."""
        self.at_once = False
        """Whether the user has asked twice to end the job."""

    @property
    def goes_on(self) -> bool:
        """Whether the job continues, that is, is not being ended for any reason."""
        return not self._outcome.signal and self.grace == self._fail_at == float("inf")

    @property
    def deadline(self) -> float:
        """Time (time.monotonic) by which `turn` must be called next."""
        return min(self._fail_at + (LEAVE_SECONDS if self._leaving else 0.0), self._end_by)

    def end(self, number: int, who: str, now: float) -> float:
        """End the job on the user's request, or at once if the user has requested it before. After Ctrl-C, workers
        receive SIGINT, and SIGTERM if they do not end; after any other signal, they receive SIGTERM. Returns the
        seconds until SIGKILL."""
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
        """Have all workers save a checkpoint, and stop them if they have not ended after --grace seconds. If `dadt run`
        itself is asked to end a second time, the workers are stopped at once."""
        before = self._outcome.preemption
        if self.goes_on:
            self._stop(Frame("preempt"), 2 * self._user_grace, preemption.who, now)
            self._outbox.say(f"{preemption.who}: workers have {self._user_grace:g} s to save (once more: at once)")
        elif before is None:  # the job is already being ended after a failure
            self._outcome.told_to_end = self._outcome.told_to_end or not preemption.host
            return
        elif not (before.host or preemption.host) and now > self._told + AGAIN_SECONDS:
            self._hurry(preemption.who, now)
        if before is None or before.host:
            follows = before is not None and before.follows and preemption.host
            self._outcome.preemption = replace(preemption, follows=follows)
            self._told = now

    def lost(self, heard: float, now: float) -> None:
        """Handle the loss of a host that was not asked to end, and whose agent was heard last at `heard`. If others
        were asked to just before, or later than that, the loss is the reason."""
        preemption, told = self._outcome.preemption, self._told
        if preemption is not None and (heard <= told or now < told + LOSS_SECONDS):
            self._outcome.preemption = replace(preemption, follows=preemption.host)

    def _hurry(self, who: str, now: float) -> None:
        self.at_once = True
        self.terminate(0.0, who, now)

    def terminate(self, grace: float, why: str, now: float, *, stacks: bool = False) -> None:
        """Send SIGTERM to all workers, and SIGKILL after `grace` seconds."""
        if grace < self.grace:
            self._stop(Frame("stop", {"grace": grace, "stacks": stacks}), grace, why, now)

    def fail_by(self, seconds: float, now: float, *, lets_leave: bool = False) -> None:
        """Stop the job after `seconds` seconds, because of a failure. Does nothing if the user or a preemption is
        already ending the job, so that workers get their full time to end. lets_leave: whether to wait first until
        ranks whose scripts have ended have exited, as one of them may be the cause."""
        if self._outcome.preemption is None and not self._outcome.signal:
            self._lets_leave = lets_leave and (self._lets_leave or self._fail_at == float("inf"))
            self._fail_at = min(self._fail_at, now + seconds)

    @property
    def _leaving(self) -> bool:
        members = [gauge.member for gauge in self._watch.gauges] if self._lets_leave else []
        return any(member.finished and not (member.ended or member.lost) for member in members)

    def excuse(self, now: float) -> None:
        """Extend the agents' deadline by the time since the last turn, in which none of their reports could be read."""
        self._end_by += now - self._turned
        self._turned = now

    def turn(self, now: float) -> bool:
        """Stop the job if the time that `fail_by` has set is reached. Call regularly. Returns whether agents have
        missed their deadline, so that they must be killed."""
        self._excuse_absence(now)
        if self._turned >= self._fail_at + (LEAVE_SECONDS if self._leaving else 0.0):
            self._fail_at = float("inf")
            self.terminate(FAILURE_GRACE, "a worker failed", now, stacks=True)
        return self._turned >= self._end_by

    def _excuse_absence(self, now: float) -> None:
        """Called whenever this process runs: it may have been stopped, or have waited to learn why an agent is gone."""
        if now - self._turned > END_SECONDS / 2:
            self.excuse(now)
        self._turned = now

    def _stop(self, order: Frame, seconds: float, why: str, now: float) -> None:
        self._excuse_absence(now)
        self.grace = seconds
        self._watch.stops(why, seconds)
        self._end_by = min(self._end_by, now + seconds + END_SECONDS)
        self._outbox.send_all(order)
