"""Four workers, two of which are killed during the training: python -m benchmarks.convergence.lost

Compares their accuracy with that of four workers without losses, which see as many samples in fewer steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.convergence.others import RANKS, workers
from benchmarks.convergence.study import Run, save

METHODS = {"pipe": [], "sync": ["--algorithm", "sync"]}
STEPS = 400
FALLS = {1: STEPS // 3, 3: 2 * STEPS // 3}
"""For each rank that is killed, the number of steps that it makes before."""
UNDISTURBED = (sum(FALLS.values()) + (RANKS - len(FALLS)) * STEPS) // RANKS
"""Number of steps in which four workers see as many samples as four workers of which two are killed."""


def accuracy(method: str, family: str, rate: float, seed: int, lost: bool) -> float:
    """Return the accuracy, in per cent, of the final weights, which are equal on all remaining ranks. lost: whether two
    ranks are killed."""
    flags = [*METHODS[method], *(["--min-np", "2"] if lost else [])]
    falls = ",".join(f"{rank}:{step}" for rank, step in FALLS.items())
    script = ["--steps", STEPS, "--falls", falls] if lost else ["--steps", UNDISTURBED]
    left = [rank for rank in range(RANKS) if not (lost and rank in FALLS)]
    with tempfile.TemporaryDirectory(prefix="dadt-lost-") as folder:
        ranks = workers(Run(family, method, RANKS, rate, seed), flags, Path(folder), *script, left=left)
    assert all(rank["digests"] == ranks[0]["digests"] for rank in ranks), "the weights of the ranks differ"
    return 100 * float(ranks[0]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="cnn")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for method in METHODS:
        found[method] = {"two lost": [], "undisturbed": []}
        for seed in range(options.seeds):
            for name, those in found[method].items():
                those.append(accuracy(method, options.family, options.rate, seed, lost=name == "two lost"))
        lost, whole = (statistics.fmean(those) for those in found[method].values())
        spread = statistics.stdev(found[method]["undisturbed"]) if options.seeds > 1 else 0.0
        print(f"{method}: {lost:.2f} % with two lost, {whole:.2f} % undisturbed (+- {spread:.2f})", flush=True)
    save(options.json, found)


if __name__ == "__main__":
    main()
