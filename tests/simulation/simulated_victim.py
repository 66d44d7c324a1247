"""What is done to a job of real processes by tests/hosts, as faults of the simulated world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from signal import SIGCONT, SIGSTOP

from hosts.known_fault import EXIT, LEAVE, RAISE, TAKE
from hosts.victim import Victim

from simulation.fault import FOR_GOOD, Fault
from simulation.host_faults import KILLED, AgentKilled, AgentStops, ClockJumps, HostCrashes, LauncherKilled
from simulation.link_faults import ControlCut, DataCut, LinkSlow
from simulation.worker_faults import ScriptExits, ScriptRaises, StepSlow, WorkerKilled, WorkerStops

SAVE_SECONDS = 0.2
LATE_SECONDS = 0.02
"""What a message of a small model takes more at 1 Mbit/s."""
ERRORS = {
    RAISE: ("ZeroDivisionError", "division by zero"),
    TAKE: ("OSError", "[Errno 24] Too many open files: '.'"),
}
"""What of a script's code raises, and what."""
NO_SPACE = "OSError", "[Errno 28] No space left on device"


class SimulatedVictim(Victim):
    """Collects the faults of a job."""

    def __init__(self, hosts: int, size: int, at: float, chance: Random, agent_ends: str = KILLED) -> None:
        """at: when it is struck, in seconds since its workers were started. agent_ends: how an agent's end is told."""
        self.hosts, self.chance, self._agent_ends = range(hosts), chance, agent_ends
        self._per_host = size // hosts
        self._now = at
        self.faults: list[Fault] = []
        self.finished: float | None = None
        """When its ranks are to end well; None if they end by themselves."""

    def ranks(self, host: int) -> set[int]:
        return set(range(host * self._per_host, (host + 1) * self._per_host))

    def pause(self, seconds: float) -> None:
        self._now += seconds

    def finish(self) -> None:
        self.finished = self._now

    def signal(self, rank: int, number: int) -> None:
        if number == SIGCONT:
            self._pass(WorkerStops(0.0, rank, FOR_GOOD))
        else:
            stops = number == SIGSTOP
            self.faults.append(WorkerStops(self._now, rank, FOR_GOOD) if stops else WorkerKilled(self._now, rank))

    def signal_in_save(self, rank: int, number: int) -> None:
        """A rank that saves has begun its next step, and takes longer for it."""
        self.faults.append(StepSlow(self._now, rank, SAVE_SECONDS))
        self.pause(SAVE_SECONDS / 2)
        self.signal(rank, number)

    def signal_agent(self, host: int, number: int) -> None:
        if number == SIGCONT:
            self._pass(AgentStops(0.0, host, FOR_GOOD, whole=False))
        else:
            stops = AgentStops(self._now, host, FOR_GOOD, whole=False)
            self.faults.append(stops if number == SIGSTOP else AgentKilled(self._now, host, self._agent_ends))

    def signal_launcher(self, number: int) -> None:
        self.faults.append(LauncherKilled(self._now))

    def run(self, code: str) -> None:
        if code in ERRORS:
            self.faults.append(ScriptRaises(self._now, 1, *ERRORS[code]))
        else:
            self.faults.append(ScriptExits(self._now, 1, 0, at_once={LEAVE: True, EXIT: False}[code]))

    def cut_power(self, host: int) -> None:
        self.faults.append(HostCrashes(self._now, host))

    def cut_data(self, host: int, other: int) -> None:
        self.faults.append(DataCut(self._now, host, other, one_way=False, lasting=FOR_GOOD))

    def cut_control(self, host: int) -> None:
        self.faults.append(ControlCut(self._now, host, up=True, down=True, lasting=FOR_GOOD))

    def cut_both(self, host: int) -> None:
        self.cut_control(host)
        self.cut_data(host, host)

    def heal(self) -> None:
        for fault in self._lasting():
            if isinstance(fault, DataCut | ControlCut):
                self._pass(fault)

    def slow(self, host: int) -> None:
        self.faults.append(LinkSlow(self._now, host, LATE_SECONDS, FOR_GOOD))

    def starve(self, rank: int) -> None:
        self.faults.append(WorkerKilled(self._now, rank, for_memory=True))

    def step_clock(self, seconds: int) -> None:
        self.faults.append(ClockJumps(self._now, 0, seconds))

    def fill_saves(self, host: int) -> None:
        """Its first rank saves there; when that has failed, the next one."""
        for rank in sorted(self.ranks(host)):
            self.faults.append(ScriptRaises(self._now, rank, *NO_SPACE))
            self.pause(SAVE_SECONDS)

    def _lasting(self) -> Iterator[Fault]:
        return iter([fault for fault in self.faults if getattr(fault, "lasting", 0.0) == FOR_GOOD])

    def _pass(self, like: Fault) -> None:
        """What is like this, and lasts, is over now."""
        for place, fault in enumerate(self.faults):
            if replace(fault, at=like.at) == like:
                self.faults[place] = replace(fault, lasting=self._now - fault.at)  # type: ignore[call-arg]
