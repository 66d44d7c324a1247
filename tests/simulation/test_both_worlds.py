"""Faults have the same outcome in the simulated world as in jobs of real processes, of which docs/results/faults.md
tells.

What is done to a job is the same function in both worlds, and so are the options.
"""

from __future__ import annotations

import re
from random import Random
from signal import SIGKILL
from typing import Any

import pytest
from harness import ROOT
from hosts.chaos.kind import KINDS, Kind
from hosts.chaos.struck import OPTIONS, RANKS, STEPS, TRAININGS, WAITS
from hosts.known_fault import HERE, SHORT, SSH, Fault, faults

from benchmarks.page import read
from dadt.config import Config
from dadt.config.config import parse
from dadt.launch.launchers.remote_shell import explain
from simulation.host_faults import KILLED
from simulation.job import SimulatedJob
from simulation.run import SimulatedRun
from simulation.scenario import Scenario
from simulation.simulated_victim import SimulatedVictim
from simulation.worker_script import BATCH_SIZE, Script
from simulation.world import EPOCH

PAGE = ROOT / "docs" / "results" / "faults.md"
NOT_SIMULATED = {
    "a full disk for logs": "nothing is decided by it",
    "a full disk for logs, and kill -9 of a worker": "the disk decides nothing, and the rest is a fault of its own",
}
"""Faults that the simulated world has not, and why."""
GRANULARITY = 2.5
"""Seconds by which what is told of a fault may differ: how often what lasts is looked at, and what a real process takes
to end."""
START_SECONDS, STEP_SECONDS, EXIT_SECONDS = 2.0, 0.03, 1.0
STRUCK = 5.0
"""When a fault strikes, in seconds since the workers were started: all of them train."""
SEEDS = 4
MOST_STEPS = 300
"""In a pass over the data: none ends before the fault, and more data only cost time."""
BY_SSH = explain(None, b"", b"", "python")
"""How an agent has ended that was killed on a host that is reached by SSH."""


def struck(victim: SimulatedVictim, options: tuple[str, ...], size: int, steps: int, seed: int) -> SimulatedJob:
    """A job that is struck, at its end. Raises Broken where anything is left, or is not as it has to be."""
    pairs = zip(options[::2], options[1::2], strict=True)  # the last of equal ones counts
    knobs = {flag.removeprefix("--").replace("-", "_"): text for flag, text in pairs}
    script = Script(
        steps=steps, step_seconds=STEP_SECONDS, start_seconds=START_SECONDS, on_interrupt="end", on_terminate="end",
        save_seconds=0.1, ends_when_saved=False, optimizers=1, samples=BATCH_SIZE * min(steps, MOST_STEPS) * size,
        evaluate_every=0, gathers_seldom=True, exit_seconds=EXIT_SECONDS,
    )  # fmt: skip
    hosts = len(victim.hosts)
    scenario = Scenario(
        seed=seed, hosts=hosts, per_host=size // hosts, clocks=(0.0,) * hosts, script=script, joins=False, spares=0,
        config=Config(np=size, **{name: parse(name, text) for name, text in knobs.items()}),
        discovers=False, started_by="ssh", early=False, faults=tuple(victim.faults), shares_disk=False,
    )  # fmt: skip
    run = SimulatedRun(scenario)
    run.run()
    return run.attempt


def lines(job: SimulatedJob) -> list[tuple[float, str]]:
    """What the user reads from the fault on, with the seconds since then."""
    launcher = job.launcher
    said = [(at, f"{level}: {text}" if level == "warning" else text) for at, level, text in launcher.said]
    last = launcher.outcome.failure.lines() if launcher.outcome is not None and launcher.outcome.failure else []
    if launcher.error is not None:
        last = [str(launcher.error)]
    assert launcher.ended_at is not None
    told = sorted([*said, *job.printed, *((launcher.ended_at, line) for line in last)], key=lambda line: line[0])
    since = job.begun + STRUCK
    return [(at - since, text) for at, text in told if at >= since]


def words(line: str) -> str:
    """Without what differs from run to run: numbers, hosts, addresses, and which parameters are waited for."""
    line = re.sub(r"(?<= waits )in step (\d+)(?:, bucket \d+ \([^)]*\)| of \d+)", r"in step \1", line.strip("`"))
    line = re.sub(r"\d+\.\d+\.\d+\.\d+", "ADDRESS", line)
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"\b(sim|host|h)\d\b", "HOST", line))


def rows(section: str) -> list[dict[str, str]]:
    return [row for table in read(PAGE, section) for row in table]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, ...], dict[str, str]]:
    """What real jobs have come to, by place, executor and fault."""
    return {(row["Where"], row["Executor"], row["Fault"]): row for row in rows("faults")}


@pytest.fixture(scope="module")
def promises() -> dict[str, dict[str, str]]:
    """How soon losses were told in real jobs that went on, by fault."""
    return {row["Fault"]: row for row in rows("chaos") if "Told, median (s)" in row}


@pytest.mark.parametrize("fault", [*faults()], ids=lambda fault: fault.title)
def test_a_user_sees_the_same(fault: Fault, outcomes: Any) -> None:
    if reason := NOT_SIMULATED.get(fault.name):
        pytest.skip(reason)
    row = outcomes[fault.place, fault.executor, fault.name]
    agent_ends = BY_SSH if fault.place == SSH else KILLED
    victim = SimulatedVictim(1 if fault.place == HERE else 2, 2, STRUCK, Random(0), agent_ends)
    fault.strike(victim)
    finished = STRUCK + 60.0 if victim.finished is None else victim.finished + 1.0
    steps = int((finished - START_SECONDS) / STEP_SECONDS)
    job = struck(victim, (*SHORT, *fault.arguments, "--executor", fault.executor), 2, steps, seed=1)
    told, launcher = lines(job), job.launcher
    code = -SIGKILL if launcher.exit_code is None else launcher.exit_code
    assert code == fault.code == int(row["Exit code"]), told
    if not fault.told:
        warned = {words(line) for _, line in told if "warning" in line}
        assert warned <= {words(row["What the user sees"])}, told
        return
    pattern = re.sub(r"\b(sim|h)(\d)\b", r"host\2", fault.told)
    at, line = next(((at, line) for at, line in told if re.search(pattern, line)), (0.0, f"not told: {told}"))
    assert words(line) == words(row["What the user sees"])
    assert abs(at - float(row["Told (s)"])) < GRANULARITY
    if fault.code:
        assert launcher.ended_at is not None
        assert abs(launcher.ended_at - job.begun - STRUCK - float(row["Over (s)"])) < GRANULARITY, told


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_same_ranks_train_on(kind: Kind, promises: Any) -> None:
    if reason := NOT_SIMULATED.get(kind.name):
        pytest.skip(reason)
    row = promises.get(kind.name)
    for seed in range(SEEDS):
        chance = Random(seed)
        training = chance.choice([each for each in TRAININGS if each.hosts >= kind.hosts])
        victim = SimulatedVictim(training.hosts, len(RANKS), STRUCK, chance)
        lost = kind.strike(victim)
        job = struck(victim, (*OPTIONS, *WAITS, *training.arguments), len(RANKS), STEPS, seed)
        told = lines(job)
        first = [worker for worker in job.workers if worker.born < job.begun + STRUCK]
        survivors = {worker.rank: worker for worker in first if worker.step == STEPS}
        assert (set(survivors), job.launcher.exit_code) == (RANKS - lost, 0), (seed, training.name, told)
        assert len({worker.training.weights[0] for worker in survivors.values()}) == 1 or not training.equal
        assert job.launcher.job is not None
        losses = job.launcher.job.watch.losses
        assert {loss.rank for loss in losses} == lost
        assert not kind.tells or any(kind.tells in line for _, line in told), told
        if row is not None and lost:
            seconds = max(loss.time for loss in losses) - EPOCH - job.begun - STRUCK
            low, high = float(row["Told, median (s)"]), float(row["worst"])
            assert low - GRANULARITY < seconds < high + GRANULARITY, (seed, training.name, told)
