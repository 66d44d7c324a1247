"""As root: python -m benchmarks.reconnection --json docs/results/reconnection.json --write docs/results/faults.md

Measures where the time goes when ranks connect anew: jobs on simulated hosts with a rank each lose one, and the others
note when they begin and end each stage, and how much processor time they have used by then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.page import publish, table
from dadt_cli.bench.figure import conditions

STEPS, LOST_AT = 30, 20
NOTED = (
    ("dadt.comm.peer_deaths", "Deaths", "regroup"),
    ("dadt.train.loss.recovery", "Recovery", "connect_anew"),
    ("dadt.train.ranks", "Ranks", "hang_up"),
    ("dadt.train.loss.recovery", "Recovery", "connect"),
    ("dadt.comm.executors.sockets", "_Entry", "connect"),
    ("dadt.control.worker_line", "WorkerLine", "exchange"),
    ("dadt.train.loss.recovery", "Recovery", "regroup"),
)
"""Module, class and method of what is noted."""
STAGES = (
    ("told of the loss, until its connection begins to close", "Deaths.regroup begins", "Ranks.hang_up begins"),
    ("closing the old connection", "Ranks.hang_up begins", "Ranks.hang_up ends"),
    ("preparing", "Ranks.hang_up ends", "_Entry.connect begins"),
    ("telling each other the addresses, over the launcher", "_Entry.connect begins", "WorkerLine.exchange ends"),
    ("clearing the kept connections, and the executor", "WorkerLine.exchange ends", "Recovery.connect ends"),
    ("comparing how far all are, and their weights", "Recovery.regroup begins", "Recovery.regroup ends"),
    ("until the next exchange begins", "Deaths.regroup begins", "Recovery.regroup begins"),
    ("all of it", "Deaths.regroup begins", "Recovery.connect_anew ends"),
)
"""Name of a stage, and between which two notes it lies."""


def train(folder: Path) -> None:
    """Train as one rank of the job, whose last rank kills itself, and write this rank's notes into the folder."""
    rank = int(os.environ["RANK"])
    notes: list[tuple[str, float, float]] = []
    torch.set_num_threads(1)
    model = torch.nn.Linear(500, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        if step == LOST_AT // 2:
            for module, kind, method in NOTED:
                _note(getattr(import_module(module), kind), method, notes)
        if step == LOST_AT and rank == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(1, 500)).pow(2).mean().backward()
        optimizer.step()
    (folder / str(rank)).write_text(json.dumps(notes))


def _note(kind: type, method: str, notes: list[tuple[str, float, float]]) -> None:
    original = getattr(kind, method)

    def noted(*arguments: Any, **words: Any) -> Any:
        name = f"{kind.__name__}.{method}"
        notes.append((f"{name} begins", time.monotonic(), time.process_time()))
        try:
            return original(*arguments, **words)
        finally:
            notes.append((f"{name} ends", time.monotonic(), time.process_time()))

    setattr(kind, method, noted)


def stages(ranks: int) -> list[dict[str, list[float]]]:
    """Run one job, and return for each rank that is left the seconds and processor seconds of each stage."""
    with tempfile.TemporaryDirectory(prefix="dadt-reconnection-") as folder:
        command = [sys.executable, "-m", "dadt_cli", "run", "-np", f"{ranks}", "--simulate-hosts", f"{ranks}"]
        command += ["--min-np", "2", "--algorithm", "sync", "-m", "benchmarks.reconnection", "--train", folder]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        every = [json.loads(Path(folder, f"{rank}").read_text()) for rank in range(ranks - 1)]
    found = []
    for notes in every:
        told = next(at for name, at, _ in notes if name == "Deaths.regroup begins")
        first: dict[str, tuple[float, float]] = {}
        for name, at, processor in notes:
            if at >= told:
                first.setdefault(name, (at, processor))
        found.append(
            {
                stage: [after - before for before, after in zip(first[begin], first[end], strict=True)]
                for stage, begin, end in STAGES
            }
        )
    return found


def page(study: dict[str, Any]) -> str:
    lines = []
    for stage, _, _ in STAGES:
        seconds, processor = zip(*(rank[stage] for rank in study["ranks"]), strict=True)
        low, high = (1e3 * each for each in (min(seconds), max(seconds)))
        lines.append(
            [stage, f"{1e3 * median(seconds):.1f} ({low:.1f} to {high:.1f})", f"{1e3 * median(processor):.1f}"]
        )
    return table(["stage", "ms", "processor, ms"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reconnection", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file of the figures")
    parser.add_argument("--write", type=Path, help="page whose section `reconnection` is written from them")
    parser.add_argument("--train", type=Path, help="be a rank of the job, and write what it notes into this folder")
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    ranks = [rank for _ in range(options.rounds) for rank in stages(options.ranks)]
    publish(
        {"conditions": conditions(), "ranks": ranks},
        page({"ranks": ranks}),
        "reconnection",
        options.json,
        options.write,
    )


if __name__ == "__main__":
    main()
