"""A job that failed starts again, as a whole, on the hosts that there are: `--max-restarts`."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dadt.errors import DadtError, LaunchError, StartTimeout
from dadt.launch.failure import Failure
from dadt.launch.outcome import Outcome, end_early
from dadt.launch.preemption import Preempted
from dadt.launch.report import Report
from dadt.launch.signals import Interrupts
from dadt.launch.startup import Voice

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
"""Time before the first attempt to find hosts again that could not be reached, and the longest such time."""
SERIES = "progress.jsonl"
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of workers that others have ended: the kernel for lack of memory, or who takes the machine away."""


class Restarts:
    """The attempts of one job. Each is a launch of all workers, in the same log folder."""

    def __init__(
        self,
        most: int,
        voice: Voice,
        report: Report,
        logs: Path,
        interrupts: Interrupts | None,
        checkpoint_signal: int,
    ) -> None:
        """most: how often to start again."""
        self._checkpoint_signal = checkpoint_signal
        self._most = most
        self._voice = voice
        self._report = report
        self._logs = logs
        self._interrupts = interrupts
        self._count = 0
        self._pause = PAUSE_SECONDS
        self._before: Any = None
        """Where and how the attempt before failed."""

    def run(self, attempt: Callable[[int], Outcome]) -> Outcome:
        """Make attempts, which are given the number of restarts so far, until one succeeds or no other may follow.

        Raises the DadtError of the last attempt, or Ended where a signal came between two attempts.
        """
        while True:
            try:
                outcome = attempt(self._count)
            except (LaunchError, StartTimeout) as error:
                # Before workers were placed, what the user has asked for cannot be had.
                if not self._report.began or not self._again(error):
                    raise
                continue
            outcome.restarts = self._count
            failed: Failure | DadtError | None = outcome.failure
            if outcome.preemption is not None and outcome.preemption.host:  # the other hosts are still there
                failed = Preempted(outcome.preemption.text)
            if outcome.signal or failed is None or not self._again(failed):
                return outcome

    def _again(self, failed: Failure | DadtError) -> bool:
        if self._count == self._most:
            return False
        now = _place(failed)
        if now is not None and now == self._before:
            self._voice.say(f"attempts {self._count} and {self._count + 1} failed alike: no restart", "warning")
            return False
        self._before = now
        self._count += 1
        why = failed.lines()[0] if isinstance(failed, Failure) else str(failed)
        self._voice.say(f"{why}: restart {self._count} of {self._most}", "warning")
        self._report.restarts(self._count, why)
        with suppress(OSError):  # that of the next attempt takes its place then
            (self._logs / SERIES).rename(self._logs / f"progress.{self._count - 1}.jsonl")
        if isinstance(failed, DadtError):
            self._wait(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True

    def _wait(self, seconds: float) -> None:
        """Raises Ended if the user ends the job meanwhile."""
        if self._interrupts is None:
            time.sleep(seconds)
        elif select.select([self._interrupts], [], [], seconds)[0]:
            end_early(self._interrupts.take(), self._checkpoint_signal, "it was not started again")


def _place(failed: Failure | DadtError) -> Any:
    """Equal for two attempts that came to the same end by themselves; None where a host or somebody ended them."""
    if isinstance(failed, DadtError) or (failed.ending.code in FROM_OUTSIDE and not failed.ending.stopped):
        return None
    return failed.step, failed.record.text if failed.record is not None else failed.ending.code
