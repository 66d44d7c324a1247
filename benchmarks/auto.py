"""What `auto` chooses on links of several speeds, against each choice by hand: python -m benchmarks.auto --json FILE

Two workers on simulated hosts (as root), and two that share memory, train a model that computes elsewhere
(benchmarks/asleep.py) with momentum: `--algorithm auto --compression auto`, and each by hand.
All are up at once and train in turn. `auto` is to be within 5 % of the best.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from dadt.algorithms.auto.choice import CLOSE
from dadt_cli.bench.figure import conditions
from dadt_cli.bench.party import Here
from dadt_cli.bench.ratio import Interval, ratio
from dadt_cli.bench.training import Contender, Task, measure
from dadt_cli.terminal.table import table

RANKS, EVERY = 2, 16
"""Workers; steps between two averages of `local`, and in each turn."""
PLACES = {
    "10mbit": ("small", ["--link", "10mbit"]),
    "100mbit": ("medium", ["--link", "100mbit"]),
    "1gbit": ("medium", ["--link", "1gbit"]),
    "10gbit": ("medium", ["--link", "10gbit"]),
    "shared memory": ("medium", []),
}
"""The model and how workers are connected. A step on the slowest link would take minutes with large weights."""
BY_HAND = [("sync", "none"), *product(("pipe", "local"), ("none", "bf16", "int8"))]
"""A compressed `sync` is never faster than `pipe` with the same."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (3)")
    parser.add_argument("--only", default=",".join(PLACES), help="places, separated by commas (all)")
    parser.add_argument("--hand", default=",".join(map(_name, BY_HAND)), help="choices by hand (all)")
    asked = parser.parse_args()
    hand = [pair for pair in BY_HAND if _name(pair) in asked.hand.split(",")]
    places = asked.only.split(",")
    found: list[dict[str, Any]] = []
    if asked.json is not None and asked.json.exists():
        found = [each for each in json.loads(asked.json.read_text()) if each["place"] not in places]
    for place in places:
        found.append(_compare(place, hand, asked.rounds))
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(_table(found)))


def _compare(place: str, hand: Sequence[tuple[str, str]], rounds: int) -> dict[str, Any]:
    model, options = PLACES[place]
    before = conditions()
    with tempfile.TemporaryDirectory() as folder:
        contenders = [
            _contender(("auto", "auto"), "--log-dir", folder),
            *map(_contender, hand),
        ]
        task = Task(f"benchmarks.asleep:{model}")
        measured = measure(contenders, task, Here(options), steps=EVERY, rounds=rounds)
        line = _line(Path(folder))
    turns = {c.name: each for c, each in zip(contenders, measured.turns, strict=True)}
    best = min(measured.rows[1:], key=lambda row: row.seconds.median).name
    speed: Interval = ratio(turns[best], turns["auto"])
    return {
        "place": place,
        "model": task.model,
        "parameters": measured.hello.parameters,
        "choice": line.partition(" chooses ")[2].partition(":")[0],
        "line": line,
        "best by hand": best,
        "speed of auto over it": asdict(speed),
        "seconds of a step": {row.name: asdict(row.seconds) for row in measured.rows},
        "conditions": before,
    }


def _name(pair: tuple[str, str]) -> str:
    algorithm, compression = pair
    return algorithm if compression in ("none", "auto") else f"{algorithm} with {compression}"


def _contender(pair: tuple[str, str], *more: str) -> Contender:
    algorithm, compression = pair
    options = ["--algorithm", algorithm, "--compression", compression, "--sync-every", str(EVERY), *more]
    return Contender(_name(pair), RANKS, tuple(options))


def _line(folder: Path) -> str:
    """The last one in which auto says what it has chosen, of the job's journal."""
    (journal,) = folder.glob("*/events.jsonl")
    found = re.findall(r'"((?:warm-up done|after) [^"]* chooses [^"]*)"', journal.read_text())
    assert found, "auto has chosen nothing"
    return str(found[-1])


def _table(found: Sequence[dict[str, Any]]) -> list[str]:
    """The speed counts with its interval over rounds."""
    lines = []
    for each in found:
        speed, seconds = each["speed of auto over it"], each["seconds of a step"]
        close = "yes" if speed["median"] >= 1 / CLOSE else "no"
        best = each["best by hand"]
        lines.append(
            [
                each["place"],
                each["choice"],
                f"{1e3 * seconds['auto']['median']:.0f}",
                best,
                f"{1e3 * seconds[best]['median']:.0f}",
                f"{speed['median']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})",
                close,
            ]
        )
    head = ["link", "auto chooses", "ms", "best by hand", "its ms", "auto's speed", "within 5 %"]
    return table(head, lines, left=["link", "auto chooses", "best by hand"])


if __name__ == "__main__":
    main()
