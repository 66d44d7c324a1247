"""What goes wrong in a simulated job: one class for each kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from signal import SIGINT, SIGTERM, SIGUSR1
from typing import TYPE_CHECKING, ClassVar

from dadt.control.frame import Frame
from simulation.worker import Exit, ScriptError

if TYPE_CHECKING:
    from simulation.agent import Agent
    from simulation.job import SimulatedJob

FOR_GOOD = float("inf")
HEARD_SECONDS = 3.0
"""When all hosts have heard each other: a way that is cut before is found as the hosts are tried at the start."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has happened, and whom it makes guilty."""

    at: float
    text: str
    ranks: frozenset[int] = frozenset()
    """Ranks that may be lost or blamed for it."""
    hosts: frozenset[int] = frozenset()
    """Hosts of which the same is true."""
    near: frozenset[int] = frozenset()
    """Hosts that others may not hear for it."""
    until: float = 0.0
    """When it is over; infinite where it lasts for good."""
    fatal: bool = False
    """Whether a rank that trains ends by it at once, and not well."""
    held: bool = False
    """Whether a rank is stopped for good by it, as its agent sees."""
    user: bool = False
    """Whether the user, or who runs the machines, ends the job by it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens so many seconds after the workers were started."""

    silences: ClassVar[bool] = True
    """Whether its hosts may not hear others for it."""
    at: float

    def strike(self, job: SimulatedJob) -> None:
        """Let it happen."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """How long it lasts; 0 if it does not pass."""
        lasting: float = getattr(self, "lasting", 0.0)
        return 0.0 if lasting == FOR_GOOD else lasting

    def _struck(self, job: SimulatedJob, text: str, **guilt: object) -> None:
        job.world.note("fault", text)
        until = job.world.now + getattr(self, "lasting", 0.0)
        named = ("host", "other") if self.silences else ()
        near = frozenset({getattr(self, name) for name in named if hasattr(self, name)})
        struck = Struck(job.world.now, text, near=near, until=until, **guilt)  # type: ignore[arg-type]
        job.invariants.struck.append(struck)


def host_guilt(job: SimulatedJob, *hosts: int) -> dict[str, frozenset[int]]:
    """The guilt of whole hosts, and so of their ranks."""
    return {"hosts": frozenset(hosts), "ranks": frozenset(rank for host in hosts for rank in job.ranks_of(host))}


def later(job: SimulatedJob, seconds: float, do: Callable[[], None]) -> None:
    if seconds != FOR_GOOD:
        job.world.after(seconds, do)


@dataclass(frozen=True, slots=True)
class WorkerKilled(Fault):
    rank: int

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None:
            fatal = worker.averaged >= 0 and not worker.closing
            self._struck(job, f"rank {self.rank} is killed", ranks=frozenset([self.rank]), fatal=fatal)
            job.kill(self.rank)


@dataclass(frozen=True, slots=True)
class ScriptRaises(Fault):
    rank: int

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None and not worker.closing:
            self._struck(job, f"the script of rank {self.rank} raises", ranks=frozenset([self.rank]))
            worker.doom = ScriptError("an error of the script")


@dataclass(frozen=True, slots=True)
class ScriptExits(Fault):
    rank: int
    code: int
    at_once: bool

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None and not worker.closing:
            how = "os._exit" if self.at_once else "sys.exit"
            self._struck(job, f"rank {self.rank} calls {how}({self.code})", ranks=frozenset([self.rank]))
            worker.doom = Exit(self.code, at_once=self.at_once)


@dataclass(frozen=True, slots=True)
class AgentKilled(Fault):
    host: int

    def strike(self, job: SimulatedJob) -> None:
        if (agent := job.agents[self.host]).process.alive:
            self._struck(job, f"the agent of host{self.host} is killed", **host_guilt(job, self.host))
            agent.die()


@dataclass(frozen=True, slots=True)
class HostCrashes(Fault):
    host: int

    def strike(self, job: SimulatedJob) -> None:
        if (agent := job.agents[self.host]).process.alive:
            self._struck(job, f"host{self.host} is gone", **host_guilt(job, self.host))
            agent.crash()
            job.network.cut([])


@dataclass(frozen=True, slots=True)
class WorkerStops(Fault):
    rank: int
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None:
            guilty = frozenset([self.rank]) if job.invariants.is_long(self.lasting) else frozenset()
            text, held = f"rank {self.rank} is stopped for {self.lasting:.1f} s", self.lasting == FOR_GOOD
            self._struck(job, text, ranks=guilty, held=held)
            worker.stop()
            later(job, self.lasting, worker.go_on)


@dataclass(frozen=True, slots=True)
class AgentStops(Fault):
    host: int
    lasting: float
    whole: bool
    """Whether its workers stop, too, as where the machine sleeps."""

    def strike(self, job: SimulatedJob) -> None:
        agent = job.agents[self.host]
        if not agent.process.alive:
            return
        guilt = host_guilt(job, self.host) if job.invariants.is_long(self.lasting, asks=True) else {}
        what = f"host{self.host}" if self.whole else f"the agent of host{self.host}"
        self._struck(job, f"{what} is stopped for {self.lasting:.1f} s", **guilt)
        stopped: list[Agent | object] = [agent, *(agent.left if self.whole else [])]
        for each in stopped:
            each.stop()  # type: ignore[attr-defined]
        later(job, self.lasting, lambda: [each.go_on() for each in stopped])  # type: ignore[attr-defined,func-returns-value]


@dataclass(frozen=True, slots=True)
class LauncherStops(Fault):
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if job.launcher.process.alive:
            guilt = host_guilt(job, *range(job.hosts)) if job.invariants.is_long(self.lasting, asks=True) else {}
            self._struck(job, f"dadt run is stopped for {self.lasting:.1f} s", **guilt)
            job.launcher.process.stop()
            later(job, self.lasting, job.launcher.process.go_on)


@dataclass(frozen=True, slots=True)
class LauncherKilled(Fault):
    def strike(self, job: SimulatedJob) -> None:
        if job.launcher.process.alive:
            self._struck(job, "dadt run is killed", user=True)
            job.launcher.die()


@dataclass(frozen=True, slots=True)
class ControlCut(Fault):
    host: int
    up: bool
    down: bool
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if job.hosts == 1:
            return
        guilt = host_guilt(job, self.host) if job.invariants.is_long(self.lasting, asks=True) else {}
        way = "both ways" if self.up and self.down else "to dadt run" if self.up else "from dadt run"
        self._struck(job, f"control of host{self.host} is cut {way} for {self.lasting:.1f} s", **guilt)
        up, down = job.agents[self.host].up, job.launcher.down[job.launcher.nodes[self.host]]
        wires = [wire for wire, is_cut in ((up, self.up), (down, self.down)) if is_cut]
        for wire in wires:
            wire.cut()
        later(job, self.lasting, lambda: [wire.mend() for wire in wires])  # type: ignore[func-returns-value]


@dataclass(frozen=True, slots=True)
class DataCut(Fault):
    host: int
    other: int
    """Another host; the same one where the host is cut off from all."""
    one_way: bool
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if job.hosts == 1:
            return
        others = [self.other] if self.other != self.host else [h for h in range(job.hosts) if h != self.host]
        guilty = [self.host, *others] if len(others) == 1 else [self.host]
        guilt = host_guilt(job, *guilty) if job.invariants.is_long(self.lasting) else {}
        to = f"host{self.other}" if self.other != self.host else "all others"
        way = "one way" if self.one_way else "both ways"
        self._struck(job, f"data between host{self.host} and {to} are cut {way} for {self.lasting:.1f} s", **guilt)
        ways = [(self.host, other) for other in others]
        ways += [] if self.one_way else [(other, self.host) for other in others]
        job.network.cut(ways)
        later(job, self.lasting, lambda: job.network.mend(ways))


@dataclass(frozen=True, slots=True)
class LinkSlow(Fault):
    host: int
    late: float
    lasting: float

    @property
    def seconds(self) -> float:
        """Nothing stands still meanwhile, so no job may take longer for it."""
        return 0.0

    def strike(self, job: SimulatedJob) -> None:
        self._struck(job, f"each message of host{self.host} takes {self.late:.2f} s more for {self.lasting:.1f} s")
        up, down = job.agents[self.host].up, job.launcher.down[job.launcher.nodes[self.host]]

        def become(slow: float) -> None:
            up.slow = down.slow = job.network.slow[self.host] = slow

        become(self.late)
        later(job, self.lasting, lambda: become(0.0))


@dataclass(frozen=True, slots=True)
class MessageLate(Fault):
    silences = False
    host: int
    up: bool
    late: float

    def strike(self, job: SimulatedJob) -> None:
        way = "to" if self.up else "of"
        self._struck(job, f"the next message {way} dadt run on the line of host{self.host} is {self.late:.1f} s late")
        (job.agents[self.host].up if self.up else job.launcher.down[job.launcher.nodes[self.host]]).delay(self.late)


@dataclass(frozen=True, slots=True)
class Stranger(Fault):
    silences = False
    host: int
    what: str

    def strike(self, job: SimulatedJob) -> None:
        agent = job.agents[self.host]
        if not agent.process.runs:
            return
        self._struck(
            job, f"a stranger speaks on the line of host{self.host}: {self.what}", **host_guilt(job, self.host)
        )
        frames: dict[str, Frame | bytes] = {
            "noise": b"\xff" * 16,
            "another rank": Frame("done", {"rank": job.size, "pid": 1000, "summary": {}, "line": 1}).encode(),
            "another kind": Frame("regroup", {"members": []}).encode(),
        }
        agent.up.send(frames[self.what])


@dataclass(frozen=True, slots=True)
class ClockJumps(Fault):
    silences = False
    host: int
    by: float

    def strike(self, job: SimulatedJob) -> None:
        self._struck(job, f"the clock of host{self.host} jumps by {self.by:.1f} s")
        job.agents[self.host].clock += self.by


@dataclass(frozen=True, slots=True)
class UserSignals(Fault):
    number: int
    again: float
    """After how many seconds the same comes once more; infinite: never."""

    def strike(self, job: SimulatedJob) -> None:
        if job.launcher.process.alive:
            ends = self.number in (SIGINT, SIGTERM)
            # Some ranks end by a signal for which they have no handler yet, or save and end while others begin.
            all_train = job.checkpoint_signal == self.number and job.all_train
            deaf = {} if ends or all_train else host_guilt(job, *range(job.hosts))
            self._struck(job, f"the user sends signal {self.number}", user=ends, **deaf)
            job.launcher.signal(self.number)
            later(job, self.again, lambda: job.launcher.signal(self.number))


@dataclass(frozen=True, slots=True)
class HostPreempted(Fault):
    host: int

    def strike(self, job: SimulatedJob) -> None:
        agent = job.agents[self.host]
        if agent.process.alive:
            self._struck(job, f"host{self.host} is told to end", user=True, **host_guilt(job, self.host))
            agent.signal(SIGTERM)


@dataclass(frozen=True, slots=True)
class StepSlow(Fault):
    rank: int
    lasting: float

    def strike(self, job: SimulatedJob) -> None:
        if (worker := job.worker(self.rank)) is not None:
            guilty = frozenset([self.rank]) if job.invariants.is_long(self.lasting) else frozenset()
            self._struck(job, f"the next step of rank {self.rank} takes {self.lasting:.1f} s more", ranks=guilty)
            worker.pause += self.lasting


def draw(random: Random, at: float, hosts: int, ranks: int) -> Fault:
    """One fault of any kind."""
    host, rank = random.randrange(hosts), random.randrange(ranks)
    lasting = random.choice([random.uniform(0.1, 5.0), random.uniform(5.0, 60.0), FOR_GOOD])
    ending = random.choice([random.uniform(0.1, 5.0), random.uniform(5.0, 60.0)])
    makes: list[Callable[[], Fault]] = [
        lambda: WorkerKilled(at, rank),
        lambda: ScriptRaises(at, rank),
        lambda: ScriptExits(at, rank, random.choice([0, 0, 1, 3]), random.random() < 0.5),
        lambda: AgentKilled(at, host),
        lambda: HostCrashes(at, host),
        lambda: WorkerStops(at, rank, lasting),
        lambda: AgentStops(at, host, lasting, random.random() < 0.5),
        lambda: LauncherStops(at, ending),
        lambda: LauncherKilled(at),
        lambda: ControlCut(at, host, *random.choice([(True, True), (True, False), (False, True)]), lasting),
        lambda: DataCut(max(at, HEARD_SECONDS), host, random.randrange(hosts), random.random() < 0.5, lasting),
        lambda: LinkSlow(at, host, random.uniform(0.05, 1.0), ending),
        lambda: MessageLate(at, host, random.random() < 0.5, random.uniform(0.1, 3.0)),
        lambda: Stranger(at, host, random.choice(["noise", "another rank", "another kind"])),
        lambda: ClockJumps(at, host, random.choice([-1.0, 1.0]) * random.choice([1.0, 100.0, 10_000.0])),
        lambda: UserSignals(
            at,
            int(random.choice([SIGINT, SIGINT, SIGTERM, SIGUSR1])),
            random.choice([0.1, 1.0, 3.0, FOR_GOOD, FOR_GOOD]),
        ),
        lambda: HostPreempted(at, host),
        lambda: StepSlow(at, rank, ending),
    ]
    weights = [6, 4, 4, 2, 2, 3, 2, 1, 0.3, 2, 2, 1, 1, 0.5, 1, 1, 1, 2]
    return random.choices(makes, weights)[0]()
