"""A job that failed starts again, as a whole, on the hosts that there are: `--max-restarts`."""

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
"""Time between two looks at the hosts, while they do not suffice."""
SILENT_SECONDS = 2.0
"""The user learns what is waited for after this many seconds."""
SERIES = "progress.jsonl"
NOT_AGAIN = "it was not started again"
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of workers that others have ended: the kernel for lack of memory, or who takes the machine away."""


class Restarts:
    """The attempts of one job. Each is a launch of all workers, in the same log folder."""

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
        """idle: answers other commands while hosts are waited for."""
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
        """The attempt before could not go on from its snapshot."""
        self._before: Any = None
        """Where and how the attempt before failed."""

    def run(self, attempt: Callable[[int, Sequence[Host]], Outcome]) -> Outcome:
        """Make attempts, which are given the number of restarts so far and the hosts to use, until one succeeds or no
        other may follow.

        Raises the DadtError of the last attempt, StartTimeout where there are too few hosts, or Ended where a signal
        came between two attempts.
        """
        while True:
            hosts = self._await_hosts()
            try:
                outcome = attempt(self._count, hosts)
                self.refused = False
            except (LaunchError, StartTimeout, ConfigError) as error:
                # Before workers were placed, what the user has asked for cannot be had.
                if not self._report.began or not self._again(error):
                    raise
                continue
            outcome.restarts = self._count
            failed: Failure | DadtError | None = outcome.failure
            if outcome.preemption is not None and outcome.preemption.host:  # the other hosts are still there
                failed = Preempted(outcome.preemption.text)
            if self._count and outcome.failure is not None and outcome.failure.says(NotResumed):
                self.refused = True
                self._most += 1  # it has tried nothing
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
        return True

    def _await_hosts(self) -> list[Host]:
        """The hosts for the next attempt, once there are enough. They were asked for just before the first one.

        Raises StartTimeout where too few come within --start-timeout seconds, or Ended.
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
            # As long as it took until the last question, so that the pauses double.
            every = min(max(ASK_SECONDS, self._discovery.asked - begin), LONGEST_PAUSE_SECONDS)
            idle = idle or self._begin_to_wait(stack)
            idle.wait(LOOK_SECONDS)
            if idle.is_killed:
                end_early({signal.SIGTERM}, 0, NOT_AGAIN)

    def _suffice(self, hosts: Sequence[Host]) -> bool:
        """Whether enough workers fit on these hosts, as far as that is known before they are asked."""
        if not (self._config.min_np or self._config.np):
            return bool(hosts) and len(hosts) == len(self._candidates.hosts)
        return self._room(hosts) >= (self._config.min_np or self._config.np)

    def _lack(self, hosts: Sequence[Host]) -> str:
        """A text that says what is missing for the next attempt."""
        named = ", ".join(map(str, hosts)) or "no host"
        away = [host.name or "this host" for host in self._candidates.hosts if host not in hosts]
        failed = f"; {', '.join(away)} failed, to be tried again" if away else ""
        if not (least := self._config.min_np or self._config.np):
            return f"{named}{failed}"
        if not hosts:
            return f"no host for {least} workers{failed}"
        return f"{named} with room for {self._room(hosts):g} workers of {least}{failed}"

    def _room(self, hosts: Sequence[Host]) -> float:
        """How many workers fit. Where only a host itself knows, enough do, but while others may yet come it counts for
        one."""
        unknown = float("inf") if len(hosts) == len(self._candidates.hosts) else 1
        return sum(host.slots or unknown for host in hosts)

    def _begin_to_wait(self, stack: ExitStack) -> Idle:
        """Raises Ended or Preempted, as it waits, if the user ends the job meanwhile."""
        idle, interrupts = stack.enter_context(self._idle()), self._interrupts
        if interrupts is not None:
            idle.watch(interrupts, lambda: end_early(interrupts.take(), of_checkpoint(self._config), NOT_AGAIN))
        return idle


def _place(failed: Failure | DadtError) -> Any:
    """Equal for two attempts that came to the same end by themselves; None where a host or somebody ended them."""
    if isinstance(failed, DadtError) or (failed.ending.code in FROM_OUTSIDE and not failed.ending.stopped):
        return None
    return failed.step, failed.record.text if failed.record is not None else failed.ending.code
