"""Draws jobs whose ranks are divided into islands: each rank is lost with its island, and `--min-np` counts islands."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from simulation.scenario import Scenario, draw

PER_HOST = (1, 2, 3, 4)
NO_SNAPSHOT = "1000steps"
"""So many that none is taken: their files are drawn without islands. New workers take the place of a lost island."""


def draw_islands(seed: int) -> Scenario:
    """The job that this seed gives, in islands: of one host, of a part of one, or over several."""
    random, scenario = Random(f"islands of {seed}"), draw(seed)
    hosts = min(scenario.hosts, 16)
    size = random.choice([2, 2, 2, 3, 4])
    fitting = [n for n in PER_HOST if hosts * n % size == 0 and hosts * n > size]
    per_host = random.choice(fitting or [2 * size])
    ranks = hosts * per_host
    count = ranks // size
    before, survives = scenario.config, scenario.started_by not in ("mpi", "hand")
    config = replace(
        before,
        island=str(size),
        np=ranks,
        min_np=random.choice([0, 1, max(1, count - 1), random.randint(1, count)]) if survives else 0,
        snapshot_every="never" if before.algorithm == "gossip" else random.choice(["never", NO_SNAPSHOT]),
        compression="none",
        redistribute=False,
    )
    faults = tuple(
        fault
        for fault in scenario.faults
        if getattr(fault, "host", 0) < hosts > getattr(fault, "other", 0) and getattr(fault, "rank", 0) < ranks
    )
    return replace(
        scenario, hosts=hosts, per_host=per_host, clocks=scenario.clocks[:hosts], config=config, joins=False, spares=0,
        faults=faults,
    )  # fmt: skip
