"""Simulate jobs: PYTHONPATH=tests:. python -m simulation --seeds 2000 [--from N] [--replay SEED]."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from simulation.mutations import MUTATIONS, mutated
from simulation.scenario import draw
from simulation.search import Found, first_of, shortest, simulate

MOST_SHOWN = 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description="Simulate jobs that fail in many ways.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many jobs")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--replay", type=int, help="show what happens in the job of this seed")
    parser.add_argument("--all", action="store_true", help="go on after a job that fails")
    parser.add_argument("--mutations", action="store_true", help="how soon each deliberate fault is found")
    parser.add_argument("--only", default="", help="of these only those with this in their names")
    given = parser.parse_args()
    if given.mutations:
        return find_mutations(given.first, given.seeds, given.only)
    if given.replay is not None:
        found = Found(draw(given.replay), "")
        print("\n".join(found.lines()))
        return 0
    begun, count = time.process_time(), 0
    reasons: Counter[str] = Counter()
    for seed in range(given.first, given.first + given.seeds):
        count += 1
        if (found := simulate(draw(seed))) is None:
            continue
        reasons[found.why.strip().splitlines()[-1][:60]] += 1
        if given.all:
            print(f"seed {seed}: {found.why.strip().splitlines()[-1][:300]}", flush=True)
            continue
        lines = shortest(found).lines()
        print("\n".join(lines if len(lines) <= MOST_SHOWN else [*lines[:20], "...", *lines[20 - MOST_SHOWN :]]))
        print(f"again: PYTHONPATH=tests:. python -m simulation --replay {seed}")
        return 1
    seconds = time.process_time() - begun
    print(f"{count:,} jobs in {seconds:.1f} s ({1e3 * seconds / max(1, count):.1f} ms each), {reasons.total()} failed")
    return 1 if reasons else 0


def find_mutations(first: int, seeds: int, only: str) -> int:
    """Print how many jobs it takes to find each deliberate fault. Returns how many are not found."""
    unfound = 0
    for name in [name for name in MUTATIONS if only in name]:
        with mutated(name):
            found = first_of(range(first, first + seeds))
        unfound += found is None
        told = "not found" if found is None else f"{found.scenario.seed - first + 1:6,}"
        why = "" if found is None else found.why.strip().splitlines()[-1][:100]
        print(f"{told:>9}  {name:58} {why}", flush=True)
    return unfound


sys.exit(main())
