"""Draws the faults of a simulated job."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from signal import SIGINT, SIGTERM, SIGUSR1

from simulation.fault import FOR_GOOD, HEARD_SECONDS, Fault
from simulation.host_faults import (
    AgentKilled,
    AgentStops,
    AllStops,
    ClockJumps,
    HostCrashes,
    HostIsFull,
    HostJoinsBadly,
    HostsChange,
    LauncherCrashes,
    LauncherKilled,
    LauncherStops,
    SnapshotDiskFull,
)
from simulation.link_faults import ControlCut, DataCut, LinkSlow, MessageLate, Stranger
from simulation.user_faults import HostPreempted, UserSignals
from simulation.worker_faults import (
    KilledAsItEnds,
    NewWorkerKilled,
    ScriptExits,
    ScriptRaises,
    StepSlow,
    WorkerKilled,
    WorkerStops,
)

WAYS_TO_JOIN = ("cannot be reached", "never answers", "answers late", "has a problem")

OPERATIONS = (
    *["step"] * 5, "who reads", "evaluation", "position", "catching up", "gathered", "writing a snapshot",
    "describing a snapshot",
    "handing over", "joining",
)  # fmt: skip


def draw(random: Random, at: float, hosts: int, ranks: int) -> Fault:
    """One fault of any kind."""
    host, rank = random.randrange(hosts), random.randrange(ranks)
    lasting = random.choice([random.uniform(0.1, 5.0), random.uniform(5.0, 60.0), FOR_GOOD])
    ending = random.choice([random.uniform(0.1, 5.0), random.uniform(5.0, 60.0)])
    makes: list[Callable[[], Fault]] = [
        lambda: NewWorkerKilled(at, random.choice(["asks", "claims its rank", "takes the state"])),
        lambda: SnapshotDiskFull(at, host, ending),
        lambda: KilledAsItEnds(at, rank, random.choice(OPERATIONS)),
        lambda: WorkerKilled(at, rank, random.random() < 0.2),
        lambda: ScriptRaises(at, rank),
        lambda: ScriptExits(at, rank, random.choice([0, 0, 1, 3]), random.random() < 0.5),
        lambda: AgentKilled(at, host),
        lambda: HostCrashes(at, host),
        lambda: WorkerStops(at, rank, lasting),
        lambda: AgentStops(at, host, lasting, random.random() < 0.5),
        lambda: LauncherStops(at, ending),
        lambda: LauncherKilled(at),
        lambda: LauncherCrashes(at),
        lambda: AllStops(at, ending),
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
        lambda: HostJoinsBadly(at, random.choice(WAYS_TO_JOIN)),
        lambda: HostsChange(at, host),
        lambda: HostIsFull(random.choice([0.0, at]), host, random.choice(["descriptors", "disk"])),
    ]
    weights = [6, 1, 1, 6, 4, 4, 2, 2, 3, 2, 1, 0.5, 0.3, 0.7, 2, 2, 1, 1, 0.5, 1, 1, 1, 2, 1, 0.5, 0.5]
    return random.choices(makes, weights)[0]()
