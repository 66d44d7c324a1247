"""Simulate what ranks do with each other: PYTHONPATH=tests:. python -m simulation.comm [--kind KIND] [--seeds N]
[--from N] [--replay SEED]."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from simulation.comm_mutations import COMM_MUTATIONS, comm_mutated
from simulation.comm_search import KINDS, SimulationKind


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.comm", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="what is simulated; all of them without it")
    parser.add_argument("--seeds", type=int, default=2000, help="how many of each kind")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--replay", type=int, help="show what happens with this seed")
    parser.add_argument("--all", action="store_true", help="go on after one that fails")
    parser.add_argument("--mutations", action="store_true", help="how soon each deliberate fault is found")
    parser.add_argument("--only", default="", help="of these only those with this in their names")
    given = parser.parse_args()
    if given.mutations:
        return _find_mutations(given)
    kinds = {given.kind: KINDS[given.kind]} if given.kind else KINDS
    if given.replay is not None:
        for kind in kinds.values():
            print("\n".join(kind.lines(kind.draw(given.replay))))
        return 0
    return max(_search(name, kind, given) for name, kind in kinds.items())


def _find_mutations(given: argparse.Namespace) -> int:
    """Print how many simulations it takes to find each deliberate fault. Returns how many are not found."""
    unfound = 0
    for name in [name for name in COMM_MUTATIONS if given.only in name]:
        with comm_mutated(name) as kind:
            found = KINDS[kind].first_of(range(given.first, given.first + given.seeds))
        unfound += found is None
        told = "not found" if found is None else f"{found[0].seed - given.first + 1:6,}"
        print(f"{told:>9}  {name:50} {found[1].strip().splitlines()[-1][:100] if found else ''}", flush=True)
    return unfound


def _search(name: str, kind: SimulationKind, given: argparse.Namespace) -> int:
    begun, reasons = time.perf_counter(), Counter[str]()
    for seed in range(given.first, given.first + given.seeds):
        if not (why := kind.fail(scenario := kind.draw(seed))):
            continue
        reasons[why.strip().splitlines()[-1][:60]] += 1
        if given.all:
            print(f"{name} seed {seed}: {why.strip().splitlines()[-1][:300]}", flush=True)
            continue
        print("\n".join(kind.lines(kind.shortest(scenario))))
        print(f"again: PYTHONPATH=tests:. python -m simulation.comm --kind {name} --replay {seed}")
        return 1
    seconds = time.perf_counter() - begun
    each = 1e3 * seconds / max(1, given.seeds)
    print(f"{name}: {given.seeds:,} in {seconds:.1f} s ({each:.1f} ms each), {reasons.total()} failed")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
