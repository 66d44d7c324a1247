"""What goes wrong on the ways between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dadt.comm.executors.meet import PATIENCE
from dadt.control.frame import Frame
from dadt.launch.members.stalls import patience
from simulation.fault import Fault, host_guilt, later

if TYPE_CHECKING:
    from simulation.job import SimulatedJob


@dataclass(frozen=True, slots=True)
class ControlCut(Fault):
    delays = True
    host: int
    up: bool
    down: bool
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if job.hosts == 1 or not job.machines[self.host].process.alive:
            return
        way = "both ways" if self.up and self.down else "to dadt run" if self.up else "from dadt run"
        text = f"control of host{self.host} is cut {way} for {self.lasting:.1f} s"
        self._struck(job, text, tries="lines", **host_guilt(self.host))
        up, down = job.machines[self.host].up, job.machines[self.host].down
        wires = [wire for wire, is_cut in ((up, self.up), (down, self.down)) if is_cut]
        for wire in wires:
            wire.cut()
        later(job, self.lasting, lambda: [wire.mend() for wire in wires])  # type: ignore[func-returns-value]


@dataclass(frozen=True, slots=True)
class DataCut(Fault):
    stays = True
    host: int
    other: int
    """Another host; the same one where the host is cut off from all."""
    one_way: bool
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if job.hosts == 1:
            return
        every = range(job.hosts + job.scenario.spares)
        others = [self.other] if self.other != self.host else [h for h in every if h != self.host]
        guilty = [self.host, *others] if len(others) == 1 else [self.host]
        to = f"host{self.other}" if self.other != self.host else "all others"
        way = "one way" if self.one_way else "both ways"
        text = f"data between host{self.host} and {to} are cut {way} for {self.lasting:.1f} s"
        self._struck(job, text, tries="ranks", **host_guilt(*guilty))
        ways = [(self.host, other) for other in others]
        ways += [] if self.one_way else [(other, self.host) for other in others]
        job.network.cut(ways)
        later(job, self.lasting, lambda: job.network.mend(ways))


@dataclass(frozen=True, slots=True)
class LinkSlow(Fault):
    stays = True
    host: int
    late: float
    lasting: float

    @property
    def seconds(self) -> float:
        """Nothing stands still meanwhile, so no job may take longer for it."""
        return 0.0

    def strike(self, job: SimulatedJob) -> None:
        if not job.machines[self.host].process.alive:
            return
        # Between two signs of life of a rank that connects pass an answer, the way to another host and back, its
        # patience, and what it then tells. Others that wait no longer than that may give it up.
        silent = PATIENCE + 4 * self.late > patience(job.config)
        hosts = frozenset([self.host] if silent else [])
        text = f"each message of host{self.host} takes {self.late:.2f} s more for {self.lasting:.1f} s"
        self._struck(job, text, hosts=hosts, tries="ranks")
        up, down = job.machines[self.host].up, job.machines[self.host].down

        def become(slow: float) -> None:
            up.slow = down.slow = job.network.slow[self.host] = slow

        become(self.late)
        later(job, self.lasting, lambda: become(0.0))


@dataclass(frozen=True, slots=True)
class MessageLate(Fault):
    silences = hinders = False
    host: int
    up: bool
    late: float

    def strike(self, job: SimulatedJob) -> None:
        if not job.machines[self.host].process.alive:
            return
        way = "to" if self.up else "of"
        self._struck(job, f"the next message {way} dadt run on the line of host{self.host} is {self.late:.1f} s late")
        (job.machines[self.host].up if self.up else job.machines[self.host].down).delay(self.late)


@dataclass(frozen=True, slots=True)
class Stranger(Fault):
    silences = False
    host: int
    what: str

    def strike(self, job: SimulatedJob) -> None:
        agent = job.machines[self.host]
        if not agent.process.runs:
            return
        self._struck(job, f"a stranger speaks on the line of host{self.host}: {self.what}", **host_guilt(self.host))
        frames: dict[str, Frame | bytes] = {
            "noise": b"\xff" * 16,
            "another rank": Frame("done", {"rank": job.size, "pid": 1000, "summary": {}, "line": 1}).encode(),
            "another kind": Frame("regroup", {"members": []}).encode(),
        }
        agent.up.send(frames[self.what])
