"""Describes how a job ended: its exit code, and the facts shown to the user."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dadt.errors import DadtError
from dadt.launch.ending.failure import Failure, signal_name
from dadt.launch.ending.preemption import EXIT_CODE, Preempted, Preemption
from dadt.launch.ending.signals import ENDING_SIGNALS
from dadt.launch.monitor.watch import Loss


@dataclass(kw_only=True)
class Outcome:
    """The facts about how a job ended."""

    seconds: float
    failure: Failure | None = None
    signal: int = 0
    """Number of the signal with which the user ended the job; 0 if the user did not end it."""
    preemption: Preemption | None = None
    """Set if the job was preempted, that is, ended because its hosts were taken away."""
    summaries: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Each rank's summary at the end of its training, by rank."""
    results: Mapping[int, bytes] = field(default_factory=dict)
    """For each rank, the pickled value that the function of `dadt.run` returned, or the exception that it raised."""
    hooked: bool = False
    """Whether any worker imported torch with DADT loaded into it."""
    stepped: bool = False
    """Whether any worker's optimizer made a step. This is known even if the process ended by os._exit without a
    report."""
    told_to_end: bool = False
    """Whether `dadt run` was asked to end while the job was already being ended after a failure, so that the job is not
    restarted."""
    losses: Sequence[Loss] = ()
    """Ranks that were lost while the others continued training."""
    restarts: int = 0
    """Number of restarts of the job before this attempt."""
    stuck: Sequence[int] = ()
    """Ids of processes that did not end even after SIGKILL."""
    resume: str = ""
    """Command that resumes the job; empty if the job succeeded or has no complete snapshot."""

    def remember(self, command: str) -> None:
        """Store the command that resumes the job, unless the job has succeeded. Called once the job has ended."""
        if self.exit_code:
            self.resume = command
        if self.failure is not None:
            self.failure = replace(self.failure, resume=command)

    @property
    def exit_code(self) -> int:
        if self.signal:
            return 128 + self.signal
        if self.preemption is not None:
            return EXIT_CODE
        return self.failure.exit_code if self.failure else 0


class Ended(DadtError):
    """Raised when a signal ended the job while it had no workers."""

    def __init__(self, number: int, *, again: bool = False) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal_name(number)
        super().__init__(f"ended by {name}; {not_started(again)}")
        self.exit_code = 128 + number


def not_started(again: bool) -> str:
    """Return a text for the user about a job that ended without workers. again: whether it had workers before, and was
    to be restarted."""
    return "it was not started again" if again else "nothing was started"


def end_early(caught: set[int], checkpoint_signal: int, *, again: bool = False) -> None:
    """Raise Ended or Preempted if one of the caught signals ends a job that has no workers. again: whether the job had
    workers before, and was to be restarted."""
    if (number := min(caught & ENDING_SIGNALS, default=0)) == signal.SIGTERM and checkpoint_signal:
        raise Preempted(f"{Preemption('dadt run was told to end (SIGTERM)').text}; {not_started(again)}")
    if number:
        raise Ended(number, again=again)


class Unread(DadtError):
    """Raised when the user ended the job while its output was blocked because nobody read it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal_name(number)} while nobody read the output; all workers stopped")
        self.exit_code = 128 + number
