"""What a job costs its launcher as it grows: one that trains for some seconds, and loses a rank on the way."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from benchmarks.page import table
from dadt.config import Config
from dadt.control.frame import Frame
from dadt.launch.job import Job
from simulation.run import SimulatedRun
from simulation.scenario import Scenario
from simulation.worker_faults import WorkerKilled
from simulation.worker_script import Script
from simulation.world import BEGIN, Link

P, T = ParamSpec("P"), TypeVar("T")
PER_HOST = 8
STEPS, STEP_SECONDS, START_SECONDS = 5, 4.0, 4.0
LOST_AT = 14.0
"""Seconds after the start of the workers: all train."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one job has cost."""

    ranks: int
    seconds: float
    """How long it has taken, in virtual time."""
    up: int
    down: int
    """Frames to the launcher, and from it."""
    up_bytes: int
    down_bytes: int
    decided: float
    """Seconds of a core in the launcher's decisions."""

    def cells(self) -> list[object]:
        ranks = self.ranks
        return [
            f"{ranks:,}", f"{self.up / ranks:.1f}", f"{self.down / ranks:.1f}", f"{self.up_bytes / ranks / 1e3:.1f}",
            f"{self.down_bytes / ranks / 1e3:.1f}", f"{1e6 * self.decided / ranks:.0f}",
            f"{100 * self.decided / self.seconds:.1f} %",
        ]  # fmt: skip


HEAD = ("Ranks", "Frames to the launcher", "from it", "kB to it", "from it", "Decisions, µs", "of a core")
"""All for each rank, but for the last one."""


def page(costs: Sequence[Cost]) -> str:
    return table(HEAD, [each.cells() for each in costs])


def cost(ranks: int) -> Cost:
    """Simulate a job of so many ranks, with 8 on each host."""
    hosts = ranks // PER_HOST
    script = Script(
        steps=STEPS, step_seconds=STEP_SECONDS, start_seconds=START_SECONDS, on_interrupt="end", on_terminate="end",
        save_seconds=0.1, ends_when_saved=False, optimizers=1, samples=ranks, evaluate_every=0, gathers_seldom=False,
    )  # fmt: skip
    scenario = Scenario(
        seed=0, hosts=hosts, per_host=PER_HOST, clocks=(0.0,) * hosts, config=Config(executor="gloo", min_np=1),
        script=script, joins=False, spares=0, discovers=False, started_by="ssh", early=False, shares_disk=False,
        faults=(WorkerKilled(LOST_AT, 1),),
    )  # fmt: skip
    run = SimulatedRun(scenario)
    run.world.most_events = 10_000 * ranks
    frames, size = Counter[Link](), Counter[Link]()
    decided = [0.0]

    def send(link: Link, frame: Frame) -> None:
        frames[link] += 1
        size[link] += len(json.dumps(frame.header)) + len(frame.body)
        sent(link, frame)

    def timed(do: Callable[P, T]) -> Callable[P, T]:
        def timed(*given: P.args, **named: P.kwargs) -> T:
            begun = time.process_time()
            try:
                return do(*given, **named)
            finally:
                decided[0] += time.process_time() - begun

        return timed

    sent = Link.send
    with patch.object(Link, "send", send), patch.object(Job, "take", timed(Job.take)), \
            patch.object(Job, "turn", timed(Job.turn)):  # fmt: skip
        run.run()
    ways = [[agent.up for agent in run.attempt.agents], [agent.down for agent in run.attempt.agents]]
    counts = [sum(each[link] for link in way) for each in (frames, size) for way in ways]
    return Cost(ranks, run.world.now - BEGIN, *counts, decided[0])
