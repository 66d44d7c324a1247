"""Draws what goes wrong before the workers of a simulated job run, and as it starts again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from signal import SIGHUP, SIGINT, SIGTERM

from simulation.fault import FOR_GOOD, Fault
from simulation.host_faults import AgentKilled, HostCrashes, MpirunKilled, ShimKilled
from simulation.link_faults import ControlCut
from simulation.start_faults import (
    WAYS_TO_START,
    HostListFails,
    HostsNotThere,
    HostStartsBadly,
    LauncherIsFull,
    NothingResumes,
    ScriptFailsAlike,
    ShimIsLate,
    StrangersCall,
    UserKills,
)
from simulation.user_faults import NodeInterrupted, UserSignals
from simulation.worker_faults import ScriptRaises, WorkerKilled
from simulation.worker_script import Script

PROBLEMS = ("ended with code 3: down", "its line 2: 'h1:two' is no host", "took longer than 10 s")


def draw(random: Random, hosts: int, ranks: int, restarts: int, *, discovers: bool) -> tuple[Fault, ...]:
    """What goes wrong then in one job."""
    drawn: list[Fault] = []
    if hosts > 1 and random.random() < 0.08:
        times = random.choice([1, 1, 2])
        count = random.choice([1, 1, 2])
        hosts_drawn = random.sample(range(hosts), min(count, hosts))
        drawn += [HostStartsBadly(0.0, host, random.choice(WAYS_TO_START), times) for host in hosts_drawn]
    if discovers and random.random() < 0.5:
        lasting = random.choice([random.uniform(1.0, 40.0), FOR_GOOD])
        makes: list[Callable[[], Fault]] = [
            lambda: HostsNotThere(random.choice([0.0, 2.0]), random.randrange(hosts), lasting),
            lambda: HostListFails(random.uniform(0.0, 5.0), random.choice(PROBLEMS), random.choice([0.02, 10.0]), 30.0),
            lambda: HostListFails(random.uniform(0.0, 5.0), "", random.uniform(1.0, 9.0), 30.0),
        ]
        drawn += [random.choice(makes)() for _ in range(random.choice([1, 2]))]
        if random.random() < 0.3:
            drawn.append(UserSignals(random.uniform(0.0, 20.0), random.choice([SIGINT, SIGTERM]), FOR_GOOD))
    if restarts and random.random() < 0.5:
        rank = random.randrange(ranks)
        again: list[Callable[[], Fault]] = [
            lambda: ScriptFailsAlike(0.0, rank, random.randint(1, 5)),
            lambda: NothingResumes(0.0, rank, random.random() < 0.5),
            lambda: UserKills(random.uniform(0.0, 30.0)),
        ]
        drawn.append(random.choice(again)())
        if random.random() < 0.3:  # a job is told to end while it ends after a failure
            at = random.uniform(0.5, 5.0)
            drawn.append(WorkerKilled(at, rank))
            drawn.append(UserSignals(at + random.uniform(0.0, 0.8), SIGTERM, FOR_GOOD))
    return tuple(drawn)


def draw_calls(random: Random) -> tuple[Fault, ...]:
    """Who calls at the port where agents are awaited, and what the launcher lacks then."""
    drawn: list[Fault] = []
    if random.random() < 0.4:
        drawn.append(StrangersCall(random.uniform(0.0, 2.0), random.choice([1, 30, 500]), random.choice([1, 3, 500])))
    if random.random() < 0.3:
        drawn.append(LauncherIsFull(random.uniform(0.0, 1.0), random.uniform(0.1, 4.0)))
    return tuple(drawn)


def draw_shims(random: Random, ranks: int, span: float) -> tuple[Fault, ...]:
    """What goes wrong with what mpirun starts, and with itself. span: seconds within which the job trains."""
    drawn: list[Fault] = []
    if random.random() < 0.15:
        seconds = random.choice([random.uniform(0.0, 10.0), FOR_GOOD])
        drawn.append(ShimIsLate(0.0, random.randrange(ranks), seconds))
    if random.random() < 0.2:
        drawn.append(ShimKilled(random.uniform(0.0, span), random.randrange(ranks)))
    if random.random() < 0.05:
        drawn.append(MpirunKilled(random.uniform(0.0, span), random.random() < 0.5))
    return tuple(drawn)


def draw_by_hand(random: Random, hosts: int, span: float) -> tuple[Fault, ...]:
    """What users do who have called `dadt run` on each host. span: seconds within which the job trains."""
    if random.random() > 0.3:
        return ()
    at, again = random.uniform(0.0, span), random.choice([0.1, 1.0, FOR_GOOD])
    return (NodeInterrupted(at, random.randrange(1, hosts), again),)


def draw_end(random: Random, hosts: int, per_host: int, script: Script, times: int) -> tuple[Fault, ...]:
    """What ends a job up to so many times while it trains, and takes snapshots; 0: once, after it has lost a host."""
    rank, host = random.randrange(hosts * per_host), random.randrange(hosts)
    at = 2 * script.start_seconds + random.uniform(0.0, 8 * script.step_seconds + 3.0)
    if not times:
        lost = (rank // per_host + random.randrange(1, hosts)) % hosts
        return HostCrashes(at, lost), WorkerKilled(at + random.uniform(1.0, 20.0), rank)
    ends: list[Callable[[float], Fault]] = [
        lambda at: WorkerKilled(at, rank),
        lambda at: ScriptRaises(at, rank),
        lambda at: AgentKilled(at, host),
        lambda at: HostCrashes(at, host),
        lambda at: ControlCut(at, host, True, random.random() < 0.5, random.choice([20.0, FOR_GOOD])),
    ]
    ats = [at]
    while len(ats) < times and random.random() < 0.5:
        ats.append(ats[-1] + random.uniform(4.0, 20.0))
    return tuple(random.choice(ends)(at) for at in ats)


def with_hangups(drawn: tuple[Fault, ...], seed: int) -> tuple[Fault, ...]:
    """Some of the Ctrl-C among these faults become the end of the terminal (SIGHUP). They are drawn apart, so that a
    seed decides all else as it does without them."""
    random = Random(f"hangups of {seed}")
    return tuple(
        replace(fault, number=int(SIGHUP))
        if isinstance(fault, UserSignals | NodeInterrupted) and fault.number == SIGINT and random.random() < 0.3
        else fault
        for fault in drawn
    )
