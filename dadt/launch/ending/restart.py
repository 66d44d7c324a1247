"""Restarts a failed job as a whole on the hosts that are available, up to `--max-restarts` times."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.errors import ConfigError, DadtError, LaunchError, NotResumed, StartTimeout
from dadt.launch.ending.failure import Failure
from dadt.launch.ending.outcome import Outcome, end_early
from dadt.launch.ending.preemption import Preempted
from dadt.launch.ending.signals import Interrupts, of_checkpoint
from dadt.launch.hosts import script
from dadt.launch.hosts.candidates import LONGEST_PAUSE_SECONDS
from dadt.launch.hosts.discovery import ASK_SECONDS, Discovery
from dadt.launch.hosts.host import Host
from dadt.launch.idle import Idle
from dadt.launch.report import JobReport
from dadt.launch.start.startup import Voice

LOOK_SECONDS = 0.1
"""Seconds between two checks for hosts, while there are too few."""
SILENT_SECONDS = 2.0
"""Seconds of waiting for hosts after which the user is informed."""
SERIES = "progress.jsonl"
NOT_AGAIN = "it was not started again"
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of workers that were killed from outside, for example by the kernel for lack of memory or by a scheduler.
"""


class Restarts:
    """The attempts of one job. Each attempt starts all workers, and all use the same log folder."""

    def __init__(
        self,
        config: Config,
        discovery: Discovery,
        voice: Voice,
        report: JobReport,
        logs: Path,
        interrupts: Interrupts | None,
        idle: Callable[[], Idle],
    ) -> None:
        """idle: creates the object that answers other dadt commands while the job waits for hosts."""
        self._config = config
        self._discovery, self._candidates = discovery, discovery.candidates
        self._voice = voice
        self._report = report
        self._logs = logs
        self._interrupts = interrupts
        self._idle = idle
        self._count = 0
        self._most = config.max_restarts
        self.refused = False
        """Whether the last attempt could not be resumed from its snapshot."""
        self._before: Any = None
        """Step and error at which the last attempt failed; None if it was ended from outside."""

    def run(self, attempt: Callable[[int, Sequence[Host]], Outcome]) -> Outcome:
        """Start the job until an attempt succeeds or no further restart is allowed. attempt: called with the number of
        restarts so far and the hosts to use.

        Raises the DadtError of the last attempt, StartTimeout if there are too few hosts, or Ended if a signal came
        between two attempts.
        """
        while True:
            hosts = self._await_hosts()
            try:
                outcome = attempt(self._count, hosts)
                self.refused = False
            except (LaunchError, StartTimeout, ConfigError) as error:
                # An error before any workers were placed comes from what the user asked for, and would occur again.
                if not self._report.began or not self._again(error):
                    raise
                continue
            outcome.restarts = self._count
            failed: Failure | DadtError | None = outcome.failure
            # only one host was taken away, so the job can restart on the others
            if outcome.preemption is not None and outcome.preemption.host:
                failed = Preempted(outcome.preemption.text)
            if self._count and outcome.failure is not None and outcome.failure.says(NotResumed):
                self.refused = True
                self._most += 1  # an attempt that could not resume has not trained, so it does not count
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
        with suppress(OSError):  # if renaming fails, the next attempt overwrites the file
            (self._logs / SERIES).rename(self._logs / f"progress.{self._count - 1}.jsonl")
        return True

    def _await_hosts(self) -> list[Host]:
        """Return the hosts for the next attempt, once there are enough. For the first attempt they are already known.

        Raises StartTimeout if there are too few after --start-timeout seconds, or Ended if the user ends the job
        meanwhile.
        """
        with ExitStack() as stack:
            return self._look_for_hosts(stack)

    def _look_for_hosts(self, stack: ExitStack) -> list[Host]:
        begin, idle = time.monotonic(), None
        every, told = 0.0 if self._count else ASK_SECONDS, ""
        while True:
            self._discovery.poll(every)
            waited = time.monotonic() - begin
            asked = not self._count or self._discovery.answered >= begin or waited > script.SECONDS
            hosts = self._candidates.usable(time.monotonic())
            if asked and self._suffice(hosts):
                return hosts
            what = self._lack(hosts)
            if waited > self._config.start_timeout and self._candidates.due(begin + waited) == float("inf"):
                raise StartTimeout(f"{what} after --start-timeout {self._config.start_timeout:g} s")
            if waited > SILENT_SECONDS and what != told:
                told = what
                self._voice.say(f"waiting for hosts: {what}")
            # Query again only after a pause as long as the wait had lasted at the last query, so that the waiting time
            # doubles from query to query.
            every = min(max(ASK_SECONDS, self._discovery.asked - begin), LONGEST_PAUSE_SECONDS)
            idle = idle or self._begin_to_wait(stack)
            idle.wait(LOOK_SECONDS)
            if idle.is_killed:
                end_early({signal.SIGTERM}, 0, NOT_AGAIN)

    def _suffice(self, hosts: Sequence[Host]) -> bool:
        """Whether the hosts have enough slots for the least number of workers, as far as slots are known before the
        hosts have reported."""
        if not (self._config.min_np or self._config.np):
            return bool(hosts) and len(hosts) == len(self._candidates.hosts)
        return self._room(hosts) >= (self._config.min_np or self._config.np)

    def _lack(self, hosts: Sequence[Host]) -> str:
        """Return a text for the user about what is missing for the next attempt."""
        named = ", ".join(map(str, hosts)) or "no host"
        away = [host.name or "this host" for host in self._candidates.hosts if host not in hosts]
        failed = f"; {', '.join(away)} failed, to be tried again" if away else ""
        if not (least := self._config.min_np or self._config.np):
            return f"{named}{failed}"
        if not hosts:
            return f"no host for {least} workers{failed}"
        return f"{named} with room for {self._room(hosts):g} workers of {least}{failed}"

    def _room(self, hosts: Sequence[Host]) -> float:
        """Return how many workers fit on these hosts. A host that alone knows its number of slots counts as one slot
        until all hosts are available, and as enough slots from then on."""
        unknown = float("inf") if len(hosts) == len(self._candidates.hosts) else 1
        return sum(host.slots or unknown for host in hosts)

    def _begin_to_wait(self, stack: ExitStack) -> Idle:
        """Begin to answer other commands while the job waits for hosts. The returned object's `wait` raises Ended or
        Preempted if the user ends the job."""
        idle, interrupts = stack.enter_context(self._idle()), self._interrupts
        if interrupts is not None:
            idle.watch(interrupts, lambda: end_early(interrupts.take(), of_checkpoint(self._config), NOT_AGAIN))
        return idle


def _place(failed: Failure | DadtError) -> Any:
    """Return a value that is equal for two attempts that failed in the same way at the same step; None if an attempt
    was ended from outside."""
    if isinstance(failed, DadtError) or (failed.ending.code in FROM_OUTSIDE and not failed.ending.stopped):
        return None
    return failed.step, failed.record.text if failed.record is not None else failed.ending.code
