"""Simulate jobs, and what ranks do with each other: PYTHONPATH=tests:. python -m simulation [--kind KIND] [--seeds N]
[--from N] [--replay SEED] [--tally FILE] [--ranks N ...]."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

from simulation.growth import cost, page
from simulation.kinds import KINDS, MOST_SEEDS, MUTATIONS
from simulation.search import CRASHED, Simulation, collects_seldom
from simulation.tally import go_on

MOST_SHOWN = 200
SEEDS = 2000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="what is simulated; all of them without it")
    parser.add_argument(
        "--seeds", type=int, help=f"how many of each kind; {SEEDS:,}, or {MOST_SEEDS:,} for --mutations"
    )
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--replay", type=int, help="show what happens with this seed")
    parser.add_argument("--all", action="store_true", help="go on after one that fails")
    parser.add_argument("--mutations", action="store_true", help="how soon each deliberate fault is found")
    parser.add_argument("--only", default="", help="of these only those with this in their names")
    parser.add_argument("--ranks", type=int, nargs="+", help="what jobs of so many ranks cost their launcher")
    parser.add_argument("--tally", type=Path, help="a file of what was found, from which this goes on up to --seeds")
    given = parser.parse_args()
    if given.ranks:
        print(page([cost(ranks) for ranks in given.ranks]))
        return 0
    given.seeds = given.seeds or (MOST_SEEDS if given.mutations else SEEDS)
    kinds = [KINDS[name] for name in given.kind or KINDS]
    if given.mutations:
        return _find_mutations(kinds, given)
    if given.replay is not None:
        for kind in kinds:
            print("\n".join(kind.lines(kind.draw(given.replay))))
        return 0
    if given.tally is not None:
        return min(1, sum(go_on(kind, given.tally, given.seeds) for kind in kinds))
    return max(_search(kind, given) for kind in kinds)


def _find_mutations(kinds: list[Simulation], given: argparse.Namespace) -> int:
    """Print how many seeds it takes to find each deliberate fault. Returns whether any is not found."""
    unfound = 0
    for name, (kind, where, what, other) in MUTATIONS.items():
        if given.only not in name or KINDS[kind] not in kinds:
            continue
        with patch.object(where, what, other):
            found = KINDS[kind].first_of(range(given.first, given.first + given.seeds))
        finds = found is not None and not found[1].startswith(CRASHED)
        unfound += not finds
        told = f"{found[0].seed - given.first + 1:6,}" if finds and found else "not found"
        print(f"{told:>9}  {name:60} {_end(found[1])[:100] if found else ''}", flush=True)
    return min(unfound, 1)


def _search(kind: Simulation, given: argparse.Namespace) -> int:
    begun, reasons = time.process_time(), Counter[str]()
    for seed in range(given.first, given.first + given.seeds):
        if not (why := kind.fail(scenario := kind.draw(seed))):
            continue
        reasons[_end(why)[:60]] += 1
        if given.all:
            print(f"{kind.name} seed {seed}: {_end(why)[:300]}", flush=True)
            continue
        lines = kind.report(scenario)
        print("\n".join(lines if len(lines) <= MOST_SHOWN else [*lines[:20], "...", *lines[20 - MOST_SHOWN :]]))
        return 1
    seconds = time.process_time() - begun
    each = 1e3 * seconds / max(1, given.seeds)
    print(f"{kind.name}: {given.seeds:,} in {seconds:.1f} s ({each:.1f} ms each), {reasons.total()} failed")
    return 1 if reasons else 0


def _end(why: str) -> str:
    return why.strip().splitlines()[-1]


with collects_seldom():
    sys.exit(main())
