"""Trains with four workers, one of them three times as slow: python -m benchmarks.convergence.straggler

Shows the throughput of the other three, relative to the same training without a straggler, and loss against time. A
step mostly waits instead of computing, because four workers share this machine's cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.convergence.others import RANKS, workers
from benchmarks.convergence.study import Run, save
from benchmarks.picture import panels

SLOWER = 3
METHODS = {"sync": ["--algorithm", "sync"], "gossip": ["--algorithm", "gossip"]}
Ranks = list[dict[str, Any]]


def train(flags: list[str], family: str, rate: float, steps: int, wait: float, straggles: bool) -> Ranks:
    """Run a training. If `straggles`, rank 0 is slow. Each rank has batches of its own, so that no rank does another's
    work."""
    run = Run(family, "", RANKS, rate, 0)
    waits = f"{SLOWER * wait}" if straggles else f"{wait}"
    with tempfile.TemporaryDirectory(prefix="dadt-straggler-") as folder:
        script = ["--steps", steps, "--wait", wait, "--straggler-wait", waits]
        return workers(run, flags, Path(folder), *script)


def throughput(ranks: Ranks) -> float:
    """Return the steps per second of all ranks except rank 0, once all have started."""
    times: list[list[float]] = [rank["times"] for rank in ranks[1:]]
    return sum((len(each) - 1) / (each[-1] - each[0]) for each in times)


def picture(found: dict[str, Ranks], path: Path) -> None:
    """Draw the mean loss of the three fast ranks against seconds."""
    with panels(path, (5.6, 3.4)) as (panel,):
        for color, (name, ranks) in zip(("#1f3b57", "#c8553d", "#8fa3b5", "#2a9d8f"), found.items(), strict=False):
            smooth = 10
            losses = [statistics.fmean(step) for step in zip(*(rank["losses"] for rank in ranks[1:]), strict=True)]
            points = [statistics.fmean(losses[i : i + smooth]) for i in range(0, len(losses), smooth)]
            times = ranks[1]["times"][smooth - 1 :: smooth]
            panel.plot(times, points[: len(losses) // smooth], color=color, label=name)
        panel.set(xlabel="seconds", ylabel="training loss", yscale="log")
        panel.grid(axis="y", alpha=0.3)
        panel.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="mlp")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--wait", type=float, default=0.1, help="seconds that each step waits")
    parser.add_argument("--json", type=Path, help="file for the figures; the picture goes beside it")
    options = parser.parse_args()
    found: dict[str, Ranks] = {}
    kept: dict[str, float] = {}
    for method, flags in METHODS.items():
        for straggles in (False, True):
            name = f"{method}, one slow" if straggles else method
            found[name] = train(flags, options.family, options.rate, options.steps, options.wait, straggles)
            print(f"{name}: {throughput(found[name]):.1f} steps/s of three workers", flush=True)
        kept[method] = throughput(found[f"{method}, one slow"]) / throughput(found[method])
        print(f"{method} keeps {100 * kept[method]:.0f} % beside a worker that is {SLOWER} times as slow")
    if options.json:
        figures = {
            "kept": kept,
            "steps per second": {name: throughput(ranks) for name, ranks in found.items()},
            "loss by rank": {name: [rank["loss"] for rank in ranks] for name, ranks in found.items()},
        }
        save(options.json, figures)
        picture(found, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
