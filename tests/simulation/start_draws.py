"""Draws what goes wrong before the workers of a simulated job run, and as it starts again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from signal import SIGINT, SIGTERM

from simulation.fault import FOR_GOOD, Fault
from simulation.start_faults import (
    WAYS_TO_START,
    HostListFails,
    HostsNotThere,
    HostStartsBadly,
    NothingResumes,
    ScriptFailsAlike,
    UserKills,
)
from simulation.user_faults import UserSignals
from simulation.worker_faults import WorkerKilled

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
