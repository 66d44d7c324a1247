"""How a job ended."""

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
    """The facts about a job of which nothing is left."""

    seconds: float
    failure: Failure | None = None
    signal: int = 0
    """The signal by which the user ended it; 0: none."""
    preemption: Preemption | None = None
    """It was preempted: the time of its hosts was over."""
    summaries: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank to its summary at the end of training."""
    results: Mapping[int, bytes] = field(default_factory=dict)
    """Rank to what the function of `dadt.run` returned or raised."""
    hooked: bool = False
    """Whether any worker imported torch with DADT hooked in."""
    stepped: bool = False
    """Whether any worker's optimizer made a step; known even if the process ended by os._exit without a report."""
    losses: Sequence[Loss] = ()
    """Ranks without which the others have trained on."""
    restarts: int = 0
    """How often the job was started again before."""
    stuck: Sequence[int] = ()
    """Processes that did not die of SIGKILL."""
    resume: str = ""
    """The command that goes on with it; empty where it came to its end, or has no whole snapshot."""

    def remember(self, command: str) -> None:
        """The job has ended, and this goes on with it."""
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
    """A signal ended the job while no workers were there."""

    def __init__(self, number: int, what: str = "nothing was started") -> None:
        super().__init__(f"ended by {'Ctrl-C' if number == signal.SIGINT else signal_name(number)}; {what}")
        self.exit_code = 128 + number


def end_early(caught: set[int], checkpoint_signal: int, what: str = "nothing was started") -> None:
    """Raises Ended or Preempted where one of these signals ends a job without workers. what: was not done any more."""
    if (number := min(caught & ENDING_SIGNALS, default=0)) == signal.SIGTERM and checkpoint_signal:
        raise Preempted(f"{Preemption('dadt run was told to end (SIGTERM)').text}; {what}")
    if number:
        raise Ended(number, what)


class Unread(DadtError):
    """The user ended the job while nobody read its output."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal_name(number)} while nobody read the output; all workers stopped")
        self.exit_code = 128 + number
