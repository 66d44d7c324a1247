"""What goes wrong with hosts, their agents and the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGKILL
from typing import TYPE_CHECKING

from dadt.launch.hosts.host import Host
from simulation.fault import Fault, host_guilt, later
from simulation.starter import Mpi

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.job import SimulatedJob

KILLED = "the agent of this host (pid 100) was killed by signal 9 (SIGKILL)"


@dataclass(frozen=True, slots=True)
class AgentKilled(Fault):
    hinders = False
    host: int
    why: str = KILLED
    """How its end is told by what has started it."""

    def strike(self, job: SimulatedJob) -> None:
        if (agent := job.machines[self.host]).process.alive:
            self._struck(job, f"the agent of host{self.host} is killed", gone=True, **host_guilt(self.host))
            agent.die(self.why)


@dataclass(frozen=True, slots=True)
class HostCrashes(Fault):
    hinders = False
    stays = True
    host: int

    def strike(self, job: SimulatedJob) -> None:
        if self.host not in job.down:
            agent, noticed = job.machines[self.host], job.config.orphan_timeout
            gone = agent.process.alive
            self._struck(job, f"host{self.host} is gone", gone=gone, noticed=noticed, **host_guilt(self.host))
            job.down.add(self.host)
            if gone:
                agent.crash()
            job.network.cut([])


@dataclass(frozen=True, slots=True)
class AgentStops(Fault):
    delays = True
    host: int
    lasting: float
    whole: bool
    """Whether its workers stop, too, as where the machine sleeps."""

    def strike(self, job: SimulatedJob) -> None:
        agent = job.machines[self.host]
        if not agent.process.alive:
            return
        what = f"host{self.host}" if self.whole else f"the agent of host{self.host}"
        self._struck(job, f"{what} is stopped for {self.lasting:.1f} s", tries="lines", **host_guilt(self.host))
        stopped: list[Agent | object] = [agent, *(agent.left if self.whole else [])]
        for each in stopped:
            each.stop()  # type: ignore[attr-defined]
        later(job, self.lasting, lambda: [each.go_on() for each in stopped])  # type: ignore[attr-defined,func-returns-value]


@dataclass(frozen=True, slots=True)
class LauncherStops(Fault):
    delays = stays = True
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if job.launcher.process.alive:
            guilt = host_guilt(*job.machines)
            self._struck(job, f"dadt run is stopped for {self.lasting:.1f} s", tries="lines", **guilt)
            job.launcher.stop()
            later(job, self.lasting, job.launcher.go_on)


@dataclass(frozen=True, slots=True)
class AllStops(Fault):
    """The machines of all hosts stand still, as where a hypervisor pauses them."""

    delays = stays = True
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if not job.launcher.process.alive:
            return
        self._struck(job, f"all hosts stand still for {self.lasting:.1f} s", tries="ranks", **host_guilt(*job.machines))
        agents = [agent for agent in job.every_agent if agent.process.alive]
        stopped = [job.launcher, *agents, *(worker for agent in agents for worker in agent.left)]
        for each in stopped:
            each.stop()  # type: ignore[attr-defined]
        # Agents go on after their workers: to the kernel of a machine that stood still no process was stopped.
        later(job, self.lasting, lambda: [each.go_on() for each in reversed(stopped)])  # type: ignore[attr-defined,func-returns-value]


@dataclass(frozen=True, slots=True)
class LauncherCrashes(Fault):
    """The machine of `dadt run` is gone, so that its agents hear nothing more, and no end either."""

    def strike(self, job: SimulatedJob) -> None:
        if job.launcher.process.alive and job.hosts > 1:
            self._struck(job, "the machine of dadt run is gone", user=True)
            job.launcher.crash()


@dataclass(frozen=True, slots=True)
class LauncherKilled(Fault):
    def strike(self, job: SimulatedJob) -> None:
        if job.launcher.process.alive:
            self._struck(job, "dadt run is killed", user=True)
            job.launcher.die()


@dataclass(frozen=True, slots=True)
class ClockJumps(Fault):
    """Where a job has one host, `dadt run` is there as well."""

    silences = hinders = False
    host: int
    by: float

    def strike(self, job: SimulatedJob) -> None:
        self._struck(job, f"the clock of host{self.host} jumps by {self.by:.1f} s")
        job.machines[self.host].clock += self.by
        job.run.clock += self.by if job.hosts == 1 else 0.0


@dataclass(frozen=True, slots=True)
class HostJoinsBadly(Fault):
    """Something is the matter with the host that is to join next."""

    how: str

    def strike(self, job: SimulatedJob) -> None:
        if job.scenario.joins:
            self._struck(job, f"the next host that is to join {self.how}")
            job.arrivals.append(self.how)


@dataclass(frozen=True, slots=True)
class HostsChange(Fault):
    """What is asked for hosts tells of fewer, or of all of them again."""

    host: int
    silences = False

    def strike(self, job: SimulatedJob) -> None:
        listed = job.run.list
        if job.scenario.discovers:
            name = f"host{self.host}"
            gone = [host for host in listed.hosts if host.name == name]
            self._struck(job, f"{name} is {'not there any more' if gone else 'there again'}, as is told")
            left = [host for host in listed.hosts if host.name != name]
            listed.change(left if gone else [*left, Host(name=name, slots=job.per_host)], job.world.now)


@dataclass(frozen=True, slots=True)
class SnapshotDiskFull(Fault):
    """The disk on which a host writes snapshots is full for a while."""

    silences = hinders = False
    stays = True
    host: int
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        disk = job.disk_of(self.host)
        self._struck(job, f"the disk with the snapshots of host{self.host} is full for {self.lasting:.1f} s")
        disk.full = True
        later(job, self.lasting, lambda: setattr(disk, "full", False))


@dataclass(frozen=True, slots=True)
class HostIsFull(Fault):
    """An agent has no descriptors left, or its host's disk is full, so that it cannot start workers."""

    host: int
    lacks: str

    def strike(self, job: SimulatedJob) -> None:
        if (agent := job.machines[self.host]).process.alive:
            self._struck(job, f"host{self.host} has no {self.lacks} left", **host_guilt(self.host))
            agent.lacks = self.lacks


@dataclass(frozen=True, slots=True)
class ShimKilled(Fault):
    """What mpirun has started in place of a worker is killed, and its worker with it. mpirun ends all others then."""

    hinders = False
    rank: int

    def strike(self, job: SimulatedJob) -> None:
        agent = job.machines[self.rank // job.per_host]
        worker, starter = job.worker(self.rank), job.starter
        if isinstance(starter, Mpi) and agent.shims.kill(self.rank):
            fatal = worker is not None and worker.trains and not worker.closing
            known = agent.is_heard and agent.shims.has_asked(self.rank)
            others = {} if known else host_guilt(*job.machines)  # the others' end may be told before, or alone
            guilt = {"ranks": frozenset([self.rank]), **others}
            self._struck(job, f"the shim of rank {self.rank} is killed", fatal=fatal, **guilt)
            starter.abort(128 + SIGKILL)


@dataclass(frozen=True, slots=True)
class MpirunKilled(Fault):
    """mpirun is killed. ends: whether what it has started on the hosts ends by that."""

    hinders = False
    ends: bool

    def strike(self, job: SimulatedJob) -> None:
        if isinstance(starter := job.starter, Mpi) and job.launcher.expects:
            self._struck(job, "mpirun is killed", **host_guilt(*job.machines))
            starter.abort(-SIGKILL) if self.ends else starter.end(-SIGKILL)
