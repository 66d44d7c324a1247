"""Workers that mpirun starts: a shim for each rank asks the agent of its host what to run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from dadt.control.frame import Frame
from dadt.launch.agent import actions
from dadt.launch.agent.registry import Line, Saying
from dadt.launch.ending.processes import Process
from simulation.worker import LINE_SECONDS, Worker

if TYPE_CHECKING:
    from simulation.agent import Agent

START_SECONDS = 0.5
"""About what mpirun takes to start a shim, and the shim until it asks."""
SPAWN_SECONDS = 0.01
SHIM_PID = 500_000


class AgentShims:
    """The shims of one host, as mpirun and the shims themselves behave."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._alive: set[int] = set()
        """The ranks whose shims mpirun has started, or is to start, and that have not ended."""
        self._lines: dict[int, Line] = {}
        self._workers: dict[int, Worker] = {}
        """The worker of each shim, by the number of the shim's connection."""

    def begin(self, ranks: Iterable[int]) -> None:
        """mpirun starts a shim for each of these ranks."""
        self._alive.update(ranks)
        for rank in ranks:
            late = self._agent.job.late_shims.get(rank, 0.0)
            seconds = late + self._agent.world.spread(START_SECONDS)
            self._agent.world.after(seconds, lambda rank=rank: self._ask(rank))  # type: ignore[misc]

    def _ask(self, rank: int) -> None:
        agent = self._agent
        if agent.process.alive and rank in self._alive:
            number = agent.next_line()
            line = self._lines[number] = Line(number, rank, Process(SHIM_PID + rank, 1))
            self._say(line, "shim", local_rank=rank % agent.job.per_host, pid=line.process.pid)

    def _say(self, line: Line, kind: str, pid: int = 0, **header: Any) -> None:
        agent = self._agent
        facts = {"rank": line.rank, **({"pid": pid} if pid else {}), **header}

        def hear() -> None:
            agent.hear_shim(Saying(line, Frame(kind, facts), Process(pid or line.process.pid, 1), agent.world.now))

        agent.process.after(LINE_SECONDS, hear)

    def perform(self, action: actions.AdmitShim | actions.OwnWorker | actions.EndWorker) -> None:
        """Do what the agent does with its shims (Supervisor._perform)."""
        agent = self._agent
        match action:
            case actions.AdmitShim(number, _):
                agent.world.after(LINE_SECONDS + SPAWN_SECONDS, lambda: self._spawn(self._lines[number]))
            case actions.OwnWorker(number, _):
                agent.own(self._workers[number])
            case actions.EndWorker(number, status, _):
                agent.ended(self._lines[number].rank, os.waitstatus_to_exitcode(status))

    def _spawn(self, line: Line) -> None:
        """A shim starts its worker."""
        agent = self._agent
        if agent.process.alive and line.rank in self._alive:
            worker = self._workers[line.number] = agent.job.spawn(agent, line.rank, joins=False)
            agent.processes.append(worker)
            self._say(line, "spawned", pid=worker.pid)

    def reap(self, worker: Worker, code: int) -> bool:
        """A worker's process has ended. Returns whether a shim tells the agent of it, or has ended before."""
        for number, each in self._workers.items():
            if each is worker:
                if worker.rank in self._alive:
                    self._alive.discard(worker.rank)
                    self._say(self._lines[number], "ended", status=code << 8 if code >= 0 else -code, peak_memory=0)
                return True
        return False

    def has_asked(self, rank: int) -> bool:
        """Whether the agent knows the shim of a rank. Of one that has not asked before its end only mpirun can tell."""
        return any(line.rank == rank for line in self._lines.values())

    def kill(self, rank: int) -> bool:
        """The shim of a rank is killed, and so is its worker: the agent hears of both by the end of the connection.
        Returns whether there was one."""
        if rank not in self._alive or not self._agent.process.alive:
            return False
        self._alive.discard(rank)
        for number, line in self._lines.items():
            if line.rank == rank:
                if number in self._workers:
                    self._workers[number].die(-SIGKILL)
                self._agent.process.after(LINE_SECONDS, lambda number=number: self._agent.hear_end(number))  # type: ignore[misc]
        return True
