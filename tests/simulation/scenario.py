"""What a seed decides before a job begins: its size, its options, its script, and what goes wrong when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from dadt.config import Config
from dadt.config.check import in_islands
from dadt.launch.hosts.host import Host
from simulation import faults, start_draws
from simulation.fault import Fault
from simulation.host_faults import AgentKilled, HostCrashes
from simulation.worker_island import TIMEOUT_SECONDS
from simulation.worker_script import BATCH_SIZE, Script

MOST_HOSTS = 64


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job and its faults."""

    seed: int
    hosts: int
    per_host: int
    clocks: tuple[float, ...]
    """For each host the seconds by which its date is ahead."""
    config: Config
    script: Script
    joins: bool
    """Whether lost hosts are replaced, by themselves or by others."""
    spares: int
    """Hosts beside those of the job."""
    discovers: bool
    """Whether it is asked for hosts again and again, as a script names them."""
    started_by: str
    """Who starts the agents: a key of STARTERS."""
    early: bool
    """Whether the times of all faults begin with `dadt run`, and not with the first workers."""
    faults: tuple[Fault, ...]
    shares_disk: bool
    """Whether all hosts write their snapshots on one disk."""

    @property
    def every_host(self) -> list[Host]:
        """The hosts that the user has named, or that a script has."""
        lone = self.hosts == 1
        names = [f"host{number}" for number in range(self.hosts + self.spares)]
        return [Host(name="" if lone else name, slots=self.per_host) for name in names]

    @property
    def limit(self) -> float:
        """Seconds within which the job has to end, whatever goes wrong."""
        config, script = self.config, self.script
        attempts = 1 + 2 * config.max_restarts
        waits = attempts * (config.start_timeout + 45.0)
        trains = attempts * 2 * (script.start_seconds + script.steps * (script.step_seconds + script.save_seconds))
        each = config.timeout + config.start_timeout + config.orphan_timeout + 2 * config.grace + 60.0
        islands = 2 * TIMEOUT_SECONDS if in_islands(config.island) else 0.0
        return (
            islands
            + waits
            + trains
            + (attempts + len(self.faults)) * each
            + sum(fault.seconds for fault in self.faults)
        )

    def lines(self) -> list[str]:
        """What it is, for those who read of it."""
        knobs = {name: getattr(self.config, name) for name in KNOBS}
        told = [f"{self.hosts} hosts with {self.per_host} ranks each, {self.spares} spare; {knobs}", f"{self.script}"]
        return told + [f"fault: {fault}" for fault in self.faults]


KNOBS = (
    "algorithm", "executor", "min_np", "timeout", "start_timeout", "stall_warning", "on_stall", "grace",
    "orphan_timeout", "heartbeat_timeout", "checkpoint_signal", "snapshot_every", "redistribute", "max_restarts",
    "launcher", "island",
)  # fmt: skip


def draw(seed: int) -> Scenario:
    random = Random(seed)
    hosts = random.choices([1, 2, 3, 4, 5, 6, 8, 16, MOST_HOSTS], [8, 8, 8, 12, 8, 6, 4, 1, 0.1])[0]
    per_host = random.choices([1, 2, 4], [6, 3, 1 if hosts < 16 else 0])[0]
    size = hosts * per_host
    gossip = random.random() < 0.2
    knobs: dict[str, Any] = {
        "algorithm": "gossip" if gossip else random.choice(["pipe", "sync"]),
        "min_np": random.choice([0, 0, 1, max(1, size - 1), random.randint(1, size)]),
        "timeout": random.choice([10.0, 15.0, 30.0]),
        "start_timeout": random.choice([15.0, 30.0]),
        "stall_warning": random.choice([5.0, 8.0, 20.0]),
        "on_stall": random.choice(["warn", "warn", "dump", "abort"]),
        "grace": random.choice([0.0, 1.0, 5.0]),
        "orphan_timeout": random.choice([5.0, 10.0, 30.0]),
        "heartbeat_timeout": random.choice([2.0, 5.0, 10.0]),
        "checkpoint_signal": random.choice(["", "", "USR1"]),
        "snapshot_every": "never" if gossip else random.choice(["never", "1step", "2steps", "3steps"]),
        "compression": "none",
        "np": size,
        "seed": 0,
    }
    if knobs["snapshot_every"] != "never" and knobs["min_np"] and random.random() < 0.3:
        knobs["compression"] = "auto"
    knobs["redistribute"] = not gossip and knobs["min_np"] > 0 and random.random() < 0.5
    script = Script(
        steps=random.randint(1, 30 if gossip else 12),
        step_seconds=random.choice([0.1, 0.5, 1.0]),
        start_seconds=random.choice([0.5, 2.0]),
        on_interrupt=random.choice(["end", "save", "ignore"]),
        on_terminate=random.choice(["end", "end", "save", "ignore"]),
        save_seconds=random.choice([0.1, 0.1, 2.0]),
        ends_when_saved=random.random() < 0.5,
        gathers_seldom=False,
        optimizers=1 if gossip else random.choice([1, 1, 2]),
        samples=random.randint(1, 4 * BATCH_SIZE * size),
        evaluate_every=random.choice([0, 0, 1, 3]),
    )
    pass_steps = -(-script.samples // (BATCH_SIZE * size))
    between = script.evaluate_every != 1 and (pass_steps > 2 or not knobs["redistribute"])
    script = replace(script, gathers_seldom=between)
    if knobs["compression"] == "none" and knobs["snapshot_every"] != "never" and random.random() < 0.1:
        script = replace(script, steps=script.steps + 30)  # time enough for a new worker
    span = 1.25 * script.start_seconds + script.steps * script.step_seconds + 2.0
    number = random.choices(range(7), [2, 3, 3, 4, 3, 2, 1])[0]
    ats = sorted(random.uniform(0.0, span) for _ in range(number))
    clocks = tuple(random.uniform(-2.0, 2.0) for _ in range(hosts))
    joins = gossip and knobs["min_np"] > 0 and hosts > 1 and random.random() < 0.7
    spares = random.choice([0, 1, 2]) if joins else 0
    drawn = tuple(faults.draw(random, at, hosts, size) for at in ats)
    if spares and random.random() < 0.5:  # a host is lost, and there is time enough for another to take its place
        kind = random.choice([AgentKilled, HostCrashes])
        lost = kind(2 * script.start_seconds + random.uniform(0.0, 5.0), random.randrange(hosts))
        drawn = (*(fault for fault in drawn if not fault.hinders), lost)
        script = replace(script, steps=script.steps + 30)
    script = replace(script, exit_seconds=random.choice([0.1, 0.1, 1.0]))
    knobs["executor"] = random.choice(["shm", "gloo"] if hosts == 1 else ["tcp", "gloo"])
    discovers = hosts > 1 and random.random() < (0.5 if joins else 0.1)
    early = random.random() < 0.15
    knobs["max_restarts"] = random.choice([0, 1, 2, 3]) if random.random() < 0.2 else 0
    drawn += start_draws.draw(random, hosts, size, knobs["max_restarts"], discovers=discovers)
    if knobs["max_restarts"] and knobs["snapshot_every"] != "never" and random.random() < 0.7:
        # A snapshot is complete when it is started again, at times on fewer hosts.
        fewer = hosts > 1 and random.random() < 0.4
        script = replace(script, steps=script.steps + (30 if fewer else 8))
        most = 0 if fewer else knobs["max_restarts"]
        drawn = (*drawn[:1], *start_draws.draw_end(random, hosts, per_host, script, most))
        if fewer:
            knobs["min_np"], knobs["redistribute"] = size - per_host, random.random() < 0.5
        elif random.random() < 0.5:
            knobs["min_np"], knobs["redistribute"], knobs["compression"] = 0, False, "none"
    shares_disk = random.random() < 0.7
    started_by = "ssh"
    if hosts > 1 and not discovers:
        if not joins and random.random() < 0.25:
            started_by = "slurm"
        elif not knobs["min_np"] and random.random() < 0.25:
            started_by = knobs["launcher"] = "mpi"
            drawn += start_draws.draw_shims(random, size, span)
        elif random.random() < 0.3:
            lasts = knobs["min_np"] or knobs["max_restarts"]  # refused where the user calls `dadt run` on each host
            started_by = "ray" if lasts or random.random() < 0.4 else "hand"
            drawn += start_draws.draw_by_hand(random, hosts, span) if started_by == "hand" else ()
        if started_by != "ssh":
            drawn += start_draws.draw_calls(random)
    drawn = start_draws.with_hangups(drawn, seed)
    return Scenario(
        seed, hosts, per_host, clocks, Config(**knobs), script, joins, spares, discovers, started_by, early, drawn,
        shares_disk,
    )  # fmt: skip
