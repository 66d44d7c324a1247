"""`make chaos` (as root)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.machine import missing
from hosts.chaos.page import page
from hosts.chaos.struck import ISLANDS, TRAININGS, Training
from hosts.chaos.trial import Row, drawn, try_out

from benchmarks.page import put

AT_ONCE = 4
"""Jobs that run at the same time."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="hosts.chaos", description="Faults in jobs with --min-np, drawn by seed.")
    parser.add_argument("--seeds", default="0-259", metavar="N-M")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the faults, by what is in name or training")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help="jobs at the same time")
    parser.add_argument("--islands", action="store_true", help="trainings in islands of two")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose section `chaos` gets the tables")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    first, last = map(int, options.seeds.split("-"))
    trainings = ISLANDS if options.islands else TRAININGS
    seeds = [seed for seed in range(first, last + 1) if options.only in _title(seed, trainings)]
    rows: list[Row] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda seed: try_out(seed, trainings), seeds):
            rows.append(row)
            verdict = row.skipped or ("kept" if row.kept else "NOT kept")
            came = f"{sorted(row.survivors)}, code {row.code}, told {row.told}, back {row.went_on}"
            came += f", equal {row.equal}, saved {row.saved}, left {row.left}"
            text = [] if row.kept else [row.text]
            print(f"{_title(row.seed, trainings)}: {verdict}: {came}", *text, sep="\n", file=sys.stderr, flush=True)
    text = page(rows, trainings, options.at_once)
    print(text)
    if options.write:
        put(options.write, "chaos islands" if options.islands else "chaos", text)
    sys.exit(not all(row.kept for row in rows))


def _title(seed: int, trainings: Sequence[Training]) -> str:
    kind, training, _ = drawn(seed, trainings)
    return f"{seed}: {kind.name} ({training.name})"


if __name__ == "__main__":
    main()
