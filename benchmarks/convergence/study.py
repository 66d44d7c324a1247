"""Lists the trainings of the study, and reads and writes the file of finished ones, which has one line of JSON for
each."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.convergence.family import FAMILIES
from benchmarks.convergence.simulator import simulate

SWEEP_SEEDS = (1000, 1001, 1002)
"""Seeds of the trainings that choose the learning rate; the trainings that are compared have other seeds."""
SWEEP_RANKS = 2


class Run(NamedTuple):
    """One training. A method that ends in "real" was run by `dadt run`, any other by the simulator."""

    family: str
    method: str
    ranks: int
    rate: float
    seed: int


Results = dict[Run, dict[str, Any]]


def load(path: Path) -> Results:
    """Return the results in the file; of two lines for one run, the last counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    results: Results = {}
    for line in map(json.loads, lines):
        if "family" in line:
            run = Run(*(line.pop(name) for name in Run._fields))
            results[run] = line
    return results


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def conditions(command: str) -> dict[str, Any]:
    """Return the conditions under which the following lines are made."""
    machine = {"cpu": cpu(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    return {"command": command, "torch": str(torch.__version__), **machine, "when": time.strftime("%Y-%m-%d %H:%M")}


def save(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures, with the command and its conditions, as JSON. Does nothing if the path is None."""
    if path is not None:
        module = Path(sys.argv[0]).stem
        command = " ".join([f"python -m benchmarks.convergence.{module}", *sys.argv[1:]])
        path.write_text(json.dumps({"conditions": conditions(command), **figures}, indent=1) + "\n")


def cpu() -> str:
    """Return the name of this host's processor; empty if the kernel does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def score(family: str, outcome: dict[str, Any]) -> float:
    """Return the accuracy or loss by which the family is judged; the worst possible value if the loss is not a
    number."""
    counts = FAMILIES[family].counts
    value = float(outcome["accuracy" if counts else "loss"])
    return value if math.isfinite(value) else (0.0 if counts else math.inf)


def best_rate(family: str, results: Results) -> float | None:
    """Return the learning rate at which `sync` was best in the sweep; None while a training of the sweep is missing."""
    found: dict[float, float] = {}
    for rate in FAMILIES[family].rates:
        runs = [Run(family, "sync", SWEEP_RANKS, rate, seed) for seed in SWEEP_SEEDS]
        if any(run not in results for run in runs):
            return None
        found[rate] = statistics.fmean(score(family, results[run]) for run in runs)
    choose = max if FAMILIES[family].counts else min
    return choose(found, key=lambda rate: found[rate])


def sweep(family: str) -> list[Run]:
    return [Run(family, "sync", SWEEP_RANKS, rate, seed) for seed in SWEEP_SEEDS for rate in FAMILIES[family].rates]


def pairs(
    family: str, rate: float, methods: Sequence[str], ranks: Sequence[int], seeds: int, twice: bool = True
) -> list[Run]:
    """Return the runs ordered by seed, so that finished ones can be compared if time runs out."""
    rates = (rate, 2 * rate) if twice else (rate,)
    return [Run(family, m, p, r, seed) for seed in range(seeds) for p in ranks for r in rates for m in methods]


def simulated(run: Run) -> dict[str, Any]:
    return simulate(FAMILIES[run.family], run.method, run.ranks, run.rate, run.seed)


def perform(
    runs: Iterable[Run], path: Path, jobs: int, deadline: float, train: Callable[[Run], dict[str, Any]] = simulated
) -> bool:
    """Run the trainings that are not in the file, and add them. Returns False if the deadline (of time.monotonic) came
    first."""
    missing = [run for run in dict.fromkeys(runs) if run not in load(path)]
    for run, outcome in trained(missing, jobs, deadline, train):
        append(path, {**run._asdict(), **outcome})
        print(f"{' '.join(map(str, run))}: loss {outcome['loss']:.4f}  accuracy {outcome['accuracy']:.4f}", flush=True)
    return all(run in load(path) for run in missing)


def trained(
    runs: Sequence[Run], jobs: int, deadline: float, train: Callable[[Run], dict[str, Any]]
) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Run the trainings, `jobs` at a time, until the deadline, and yield each with its outcome. With one job they run
    in this process, so that stopping it stops all."""
    if jobs == 1:
        for run in runs:
            if time.monotonic() > deadline:
                return
            yield run, train(run)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for first in range(0, len(runs), jobs):
            if time.monotonic() > deadline:
                return
            some = runs[first : first + jobs]
            yield from zip(some, pool.map(train, some), strict=True)
