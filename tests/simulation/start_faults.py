"""What goes wrong before workers run: as hosts are reached or asked for, and as a job starts again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dadt.errors import NotResumed
from simulation.door import Caller
from simulation.fault import Fault, later
from simulation.worker_script import ScriptError

if TYPE_CHECKING:
    from simulation.job import SimulatedJob

WAYS_TO_START = (
    "cannot be reached", "is never reached", "is reached late", "never answers", "answers late", "has a problem",
    "has another version", "dies at once",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostStartsBadly(Fault):
    """Something is the matter with a host as its agent is started."""

    from_start = True
    host: int
    how: str
    times: int
    """In how many attempts."""

    def strike(self, job: SimulatedJob) -> None:
        job.world.note("fault", f"host{self.host} {self.how}, {self.times} times")
        job.bad_starts.setdefault(self.host, []).extend([self.how] * self.times)


@dataclass(frozen=True, slots=True)
class HostsNotThere(Fault):
    """Who is asked for hosts tells of fewer for a while."""

    from_start = True
    delays = stays = True
    first: int
    """The first host that is not there, as all after it."""
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        run = job.run
        gone = frozenset(range(self.first, job.hosts))
        self._struck(job, f"only {self.first} hosts are there for {self.lasting:.1f} s", hosts=gone)
        every = list(run.list.hosts)
        run.list.change([host for host in every if int(host.name.removeprefix("host")) not in gone], job.world.now)
        if not job.launcher.nodes and not job.number:  # the plan has asked, too
            run.discovery.candidates.hosts = list(run.list.hosts)
            run.listed = {host.name for host in run.list.hosts}
        later(job, self.lasting, lambda: run.list.change(every, job.world.now))


@dataclass(frozen=True, slots=True)
class HostListFails(Fault):
    """Who is asked for hosts does not answer, or gives no list of hosts, for a while."""

    problem: str
    seconds_to_answer: float
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        listed = job.run.list
        if not job.scenario.discovers:
            return
        self._struck(job, f"the list of hosts: {self.problem or 'is slow'} for {self.lasting:.1f} s")
        listed.problem, listed.seconds = self.problem, self.seconds_to_answer

        def mend() -> None:
            listed.problem, listed.seconds = "", 0.02
            listed.change(listed.hosts, job.world.now)

        later(job, self.lasting, mend)


@dataclass(frozen=True, slots=True)
class ScriptFailsAlike(Fault):
    """The script of a rank raises the same at the start of each attempt."""

    from_start = True
    rank: int
    times: int

    def strike(self, job: SimulatedJob) -> None:
        job.run.dooms[self.rank] = [ScriptError("RuntimeError", "always the same")] * self.times


@dataclass(frozen=True, slots=True)
class NothingResumes(Fault):
    """The script cannot go on from its snapshot, wherever one is given to it."""

    from_start = True
    rank: int
    always: bool
    """Whether it raises that also where no snapshot is given to it."""

    def strike(self, job: SimulatedJob) -> None:
        run = job.run

        def refuse(count: int) -> Exception | None:
            return NotResumed(f"no array {count} in the snapshot") if self.always or not run.restarts.refused else None

        run.refuses[self.rank] = refuse


@dataclass(frozen=True, slots=True)
class UserKills(Fault):
    """`dadt kill`, from another terminal."""

    def strike(self, job: SimulatedJob) -> None:
        run = job.run
        if run.process.runs and run.waits:
            self._struck(job, "the user kills the job", user=True)
            run.killed = True
        elif run.process.runs and job.launcher.job is not None and job.launcher.expects:
            self._struck(job, "the user kills the job", user=True)
            job.launcher.kill()


@dataclass(frozen=True, slots=True)
class StrangersCall(Fault):
    """Some who do not know the job's key, or who have the name of a host that has come, call where agents are
    awaited."""

    from_start = True
    silences = hinders = False
    count: int
    addresses: int
    """From how many hosts."""

    def strike(self, job: SimulatedJob) -> None:
        if (door := job.starter.door) is None:
            return
        job.world.note("fault", f"{self.count} strangers call from {self.addresses} hosts")
        random = job.world.random
        for number in range(self.count):
            came = [node.name for node in job.launcher.down]
            name = random.choice(["", "", "nobody", *came])
            address = f"10.1.{number % self.addresses >> 8}.{number % self.addresses & 255}"
            caller = Caller(address, 0.001, name, lambda: None, lambda: None)
            job.world.after(random.random() * 0.5, lambda caller=caller: door.call(caller))  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class LauncherIsFull(Fault):
    """The launcher has no descriptors left for a while, so that nobody who calls gets in."""

    from_start = True
    silences = hinders = False
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if (door := job.starter.door) is not None:
            job.world.note("fault", f"the launcher has no descriptors left for {self.lasting:.1f} s")
            door.full = True
            later(job, self.lasting, lambda: setattr(door, "full", False))


@dataclass(frozen=True, slots=True)
class ShimIsLate(Fault):
    """mpirun starts a rank later than the others, or never."""

    from_start = True
    silences = hinders = False
    stays = True
    rank: int
    late: float

    def strike(self, job: SimulatedJob) -> None:
        host = self.rank // job.per_host
        self._struck(job, f"mpirun starts rank {self.rank} {self.late:.1f} s late", hosts=frozenset([host]))
        job.run.late_shims[self.rank] = min(self.late, 1e6)
