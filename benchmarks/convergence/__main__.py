"""python -m benchmarks.convergence: runs the trainings that the file of results does not have yet, then writes tables
and pictures."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from benchmarks.convergence import others, report
from benchmarks.convergence.family import FAMILIES
from benchmarks.convergence.method import Method
from benchmarks.convergence.study import append, best_rate, conditions, load, pairs, perform, sweep

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "convergence.jsonl"
PAGE = RESULTS.with_name("accuracy.md")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--families", default="cnn,mlp,gpt", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--ranks", help="numbers of workers  [default: 2,4,8,16; with --others 4]")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--methods", default="sync,plain,pipe", help="separated by ; where one has commas")
    parser.add_argument(
        "--others", default="", help=f"real workers, in place of the simulator: {', '.join(others.FLAGS)}"
    )
    parser.add_argument("--rate", type=float, default=0.0, help="0: the one that a sweep finds best for sync")
    parser.add_argument("--budget-minutes", type=float, default=math.inf, help="begin nothing after so long")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, each with one thread")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="file of JSON lines; what it holds is not repeated"
    )
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    options.methods = options.methods.split(";" if ";" in options.methods else ",")
    try:
        options.families = [FAMILIES[name] for name in options.families.split(",")]
        options.others = [others.checked(name) for name in filter(None, options.others.split(","))]
        ranks = options.ranks or (str(others.RANKS) if options.others else "2,4,8,16")
        options.ranks = [int(number) for number in ranks.split(",")]
        for method in options.methods:
            Method.parse(method)
    except (KeyError, ValueError) as error:
        parser.error(str(error))
    return options


def train(options: argparse.Namespace, deadline: float) -> bool:
    """Run the missing trainings. Returns False if time ran out."""
    for family in (family.name for family in options.families):
        rate: float | None = options.rate
        if not rate:
            perform(sweep(family), options.results, options.jobs, deadline)
            rate = best_rate(family, load(options.results))
        if rate is None:
            return False
        if options.others:
            runs = pairs(family, rate, ["sync", *options.others], options.ranks, options.seeds, twice=False)
            done = perform(runs, options.results, 1, deadline, others.train)
        else:
            runs = pairs(family, rate, options.methods, options.ranks, options.seeds)
            done = perform(runs, options.results, options.jobs, deadline)
        if not done:
            return False
    return True


def main() -> None:
    options = arguments()
    if not options.report:
        append(
            options.results, {"conditions": conditions(" ".join(["python -m benchmarks.convergence", *sys.argv[1:]]))}
        )
        if not train(options, time.monotonic() + 60 * options.budget_minutes):
            print("time is up: the same command goes on from here")
    report.write(options.results, PAGE if options.results == RESULTS else None)


if __name__ == "__main__":
    main()
