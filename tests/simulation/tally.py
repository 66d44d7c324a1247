"""What many simulations have found, in a file from which later ones go on."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from simulation.kinds import KINDS
from simulation.search import Simulation

BLOCK = 500
"""Seeds after which the file is written: at most these of each process are lost where it is stopped."""
FOLDERS = ("dadt", "csrc", "tests/simulation")


def go_on(kind: Simulation, path: Path, seeds: int) -> int:
    """Simulate the seeds that the file does not hold, until there are so many. Returns how many have failed in all."""
    told: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    parts = told.setdefault(kind.name, [])
    version = _version()
    done = parts[-1]["to"] if parts else 0
    if done < seeds and not (parts and parts[-1]["version"] == version):
        parts.append(
            {"version": version, "day": "", "from": done, "to": done, "seconds": 0.0, "faults": {}, "found": []}
        )
    blocks = [range(each, min(seeds, each + BLOCK)) for each in range(done, seeds, BLOCK)]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as processes:
        # in order, as the file holds all seeds below one
        for found in processes.map(_simulate, repeat(kind.name), blocks):
            _add(parts[-1], found)
            half = path.with_suffix(".half")
            half.write_text(json.dumps(told, indent=1) + "\n")
            half.rename(path)
    print(f"{kind.name}: {page(parts)}")
    return sum(len(part["found"]) for part in parts)


@dataclass(frozen=True, slots=True)
class Block:
    """What the simulations of one block of seeds have found."""

    end: int
    """The seed after its last one."""
    seconds: float
    """Processor time that it took."""
    faults: Counter[str]
    """How many faults of each kind have come."""
    found: list[dict[str, Any]]
    """The seeds that have failed, each with what did not hold."""


def _simulate(name: str, seeds: range) -> Block:
    kind, begun = KINDS[name], time.process_time()
    faults, found = Counter[str](), list[dict[str, Any]]()
    for seed in seeds:
        scenario = kind.draw(seed)
        faults.update(type(fault).__name__ for fault in scenario.faults)
        if why := kind.fail(scenario):
            found.append({"seed": seed, "why": why.strip().splitlines()[-1][:300]})
    return Block(seeds.stop, time.process_time() - begun, faults, found)


def _add(part: dict[str, Any], block: Block) -> None:
    faults = Counter[str](part["faults"]) + block.faults
    part["found"].extend(block.found)
    seconds = round(part["seconds"] + block.seconds, 1)
    part.update(day=f"{date.today()}", to=block.end, seconds=seconds, faults=dict(sorted(faults.items())))


def page(parts: list[dict[str, Any]]) -> str:
    """What was simulated, in a sentence."""
    count, seconds = parts[-1]["to"], sum(part["seconds"] for part in parts)
    faults = sum(sum(part["faults"].values()) for part in parts)
    found = sum(len(part["found"]) for part in parts)
    each = 1e3 * seconds / max(1, count)
    return f"{count:,} with {faults:,} faults in {seconds / 60:,.0f} min ({each:.1f} ms each), {found} failed"


def _version() -> str:
    """What decides what a seed means: the trees of this checkout, with a mark where files have changed since."""
    trees = [_git("rev-parse", "--short", f"HEAD:{folder}").strip() for folder in FOLDERS]
    return "-".join(trees) + ("-dirty" if _git("status", "--porcelain", *FOLDERS) else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout
