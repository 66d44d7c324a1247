"""Deliberate faults in the decisions on how a job starts, restarts and finds its hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dadt.control.absence import Absence, Deadline
from dadt.control.accept import Entrance
from dadt.errors import ConfigError, StartTimeout
from dadt.launch.ending import restart
from dadt.launch.ending.restart import Restarts
from dadt.launch.ending.termination import Termination
from dadt.launch.hosts.candidates import Candidates
from dadt.launch.hosts.discovery import Discovery
from dadt.launch.launchers.connect_back import ConnectBackLauncher
from dadt.launch.start import startup
from simulation import launcher


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a function that is forgotten."""


def never(*_: Any, **__: Any) -> bool:
    """Stands for a question that is always denied."""
    return False


def again_and_again(self: Restarts, failed: Any) -> bool:
    self._most = self.count + 1
    return again(self, failed)


def free(self: Restarts, outcome: Any) -> bool:
    """No attempt that could not resume counts, whether it had a snapshot or not."""
    self.refused = False
    return restarts_ended(self, outcome)


def reckless(self: Restarts, error: Any, hosts: Any, now: float, *, began: bool) -> bool:
    return restarts_failed(self, error, hosts, now, began=True)


def endless_wait(self: Restarts, now: float) -> Any:
    try:
        return hosts(self, now)
    except StartTimeout:
        return None


def emptied(self: Discovery, answer: Any) -> str:
    told = take(self, answer)
    if isinstance(answer, ConfigError):
        self.candidates.hosts = []
    return told


def ignored(self: Discovery, answer: Any) -> str:
    self._asking, self.answered = False, self.asked
    return ""


def endless(self: Deadline, now: float) -> float:
    self.at = float("inf")
    return turn(self, now)


def untold(self: Termination, preemption: Any, now: float) -> None:
    preempt(self, preemption, now)
    self._outcome.told_to_end = False


def lenient(*given: Any, all_needed: bool = True, again: bool = False) -> Any:
    return gather(*given, all_needed=False, again=again)


def forgetful(self: ConnectBackLauncher, hello: Any) -> Any:
    """Of those that are expected it does not know who has come."""
    return {} if hello.get("name") in self._arrivals else greet(self, hello)


greet = ConnectBackLauncher._greet
again, restarts_ended, restarts_failed = Restarts._again, Restarts.ended, Restarts.failed
preempt = Termination.preempt
hosts, take, turn, gather = Restarts.hosts, Discovery.take, Deadline.turn, startup.gather

START_MUTATIONS: Mapping[str, tuple[Any, str, Any]] = {
    "a job is started again more often than it may": (Restarts, "_again", again_and_again),
    "a job that has failed is never started again": (Restarts, "_again", never),
    "attempts that fail alike go on": (restart, "_place", nothing),
    "no attempt that cannot resume counts": (Restarts, "ended", free),
    "what was never started is started again": (Restarts, "failed", reckless),
    "a signal between two attempts is forgotten": (restart, "end_early", nothing),
    "too few hosts suffice": (Restarts, "_suffice", lambda self, hosts: True),
    "a job waits for hosts without end": (Restarts, "hosts", endless_wait),
    "a host that has failed is used at once": (Candidates, "failed", nothing),
    "a list of hosts that cannot be read is an empty one": (Discovery, "take", emptied),
    "no answer changes the hosts": (Discovery, "take", ignored),
    "hosts are asked for once": (Discovery, "asks", never),
    "an agent is awaited without end": (Deadline, "turn", endless),
    "the time in which the launcher slept is the hosts' silence": (Absence, "lasted", lambda self, patience, now: 0.0),
    "a host with a problem takes part": (startup, "problem_of", lambda ready, host="": ""),
    "a job starts without hosts that it needs": (launcher, "gather", lenient),
    "strangers who call are never sent away": (Entrance, "_drop_one", never),
    "who calls is never sent away where descriptors lack": (Entrance, "_turn_away", nothing),
    "an agent that comes twice is let in": (ConnectBackLauncher, "_greet", forgetful),
    "a job that is told to end while it fails is started again": (Termination, "preempt", untold),
}
"""Each fault by what it is: what it replaces, and by what."""
