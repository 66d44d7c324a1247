"""Stopping a host's workers in phases: dump stacks, SIGTERM, SIGKILL, and then the processes that got away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from dadt.launch.agent.dump import Dump, Offers, Stack
from dadt.launch.agent.worker import Worker
from dadt.launch.processes import TRACKER_SECONDS, kill, members, without_trackers

STACK_SECONDS = 0.5
KILL_SECONDS = 3.0


class Stop:
    """One stop, which the agent advances until it is `finished`. Never blocks."""

    def __init__(
        self,
        mark: str,
        workers: Sequence[Worker],
        dumps: Offers,
        natural: float,
        grace: float,
    ) -> None:
        """mark: the variable by which the agent's processes are known. workers: those that live. dumps: the processes
        that write their stacks when asked.

        natural: seconds in which the processes may end by themselves. grace: seconds from SIGTERM to SIGKILL.
        """
        self._mark = mark
        self._workers = workers
        self._grace = grace
        self._begin = time.monotonic()
        self._natural_end = self._begin + natural
        self._dump: Dump | None = Dump(dumps, STACK_SECONDS)
        self._kill_at = 0.0
        self.natural = natural > 0
        self.signalled = False
        """Whether SIGTERM was sent: from then on a worker's end counts as caused by the stop."""
        self.finished = False
        self.stuck: list[int] = []
        """Processes that did not die of SIGKILL."""

    def end_naturally_in(self, seconds: float) -> None:
        """What still runs of its own accord has no more than these seconds."""
        self._natural_end = min(self._natural_end, time.monotonic() + seconds)

    def hasten(self, grace: float) -> None:
        self._grace = min(self._grace, grace)
        if self.signalled:
            self._kill_at = min(self._kill_at, time.monotonic() + grace)

    def advance(self) -> list[Stack]:
        """Take the steps that are due. Returns the stacks that were written."""
        now = time.monotonic()
        stacks: list[Stack] = []
        if self._dump is not None:
            self._dump.advance()
            if not self._dump.complete:
                return []
            stacks, self._dump = self._dump.stacks, None
        left = members(self._mark, descendants=True)
        if not left:
            self.finished = True
        elif not self.signalled:
            if now >= self._natural_end:
                self._terminate(left, now)
        elif now >= self._kill_at:
            kill(left if now >= self._kill_at + TRACKER_SECONDS else without_trackers(left), signal.SIGKILL)
            if now >= self._kill_at + KILL_SECONDS:
                self.stuck = left
                self.finished = True
        return [stack for stack in stacks if stack.text]

    def _terminate(self, left: Sequence[int], now: float) -> None:
        self.signalled = True
        self.natural = False
        self._kill_at = now + self._grace
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        kill((pid for pid in left if not _in_groups(pid, self._workers)), signal.SIGTERM)


def _in_groups(pid: int, workers: Sequence[Worker]) -> bool:
    try:
        return os.getpgid(pid) in {worker.pid for worker in workers}
    except ProcessLookupError:
        return True  # the process has ended and needs no signal
