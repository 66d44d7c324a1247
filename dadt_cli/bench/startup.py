"""Measures the time from the command to the first training step, for `dadt run` and torchrun in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dadt.errors import ConfigError, DadtError
from dadt_cli.bench.folder import folder
from dadt_cli.bench.ranks import take_turns
from dadt_cli.bench.ratio import Interval, cell, interval, ratio

SECONDS = 120.0
Progress = Callable[[str], None]
"""Called with a text that names the launcher whose start is measured next."""


@dataclass(frozen=True, slots=True)
class StartupRow:
    """Seconds until the first step for one launcher, and their ratio to torchrun's seconds, divided round by round."""

    name: str
    seconds: Interval
    ratio: Interval


COLUMNS: dict[str, Callable[[StartupRow], str]] = {
    "": lambda row: row.name,
    "seconds": lambda row: cell(row.seconds),
    "ratio": lambda row: cell(row.ratio),
}


def measure(*, ranks: int, rounds: int, progress: Progress = lambda what: None) -> list[StartupRow]:
    """Measure for each launcher the seconds until the last rank has taken its first step, and the ratio to torchrun's
    seconds in the same round.

    Raises ConfigError for arguments out of range, DadtError if a start fails.
    """
    if ranks < 1:
        raise ConfigError(f"-np {ranks}: the number of workers must be 1 or more")
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: must be 1 or more, and 6 for an interval of 95 %")
    script = str(Path(__file__).with_name("first_step.py"))
    python = [sys.executable, "-m"]
    with folder() as place:
        stamps = place / "stamps"
        ways = {
            "torchrun": [*python, "torch.distributed.run", f"--nproc-per-node={ranks}", script, str(stamps), "--ddp"],
            "dadt run": [*python, "dadt_cli", "run", "-np", str(ranks), "--log-dir", str(place), script, str(stamps)],
        }

        def before(name: str, number: int) -> None:
            progress(f"{name}, {f'round {number} of {rounds}' if number else 'which warms the disk up'}")

        contenders = {name: partial(_until_first_step, name, command, stamps, ranks) for name, command in ways.items()}
        times = take_turns(contenders, rounds, 1, before)
    return [StartupRow(name, interval(t), ratio(t, times["torchrun"])) for name, t in times.items()]


def _until_first_step(name: str, command: Sequence[str], stamps: Path, ranks: int) -> float:
    stamps.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 (the child's whole environment, not a knob)
    begun = time.time()
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DadtError(f"{name}: no end within {SECONDS:g} s of its start") from None
    # The exit code is ignored: Gloo's threads sometimes abort a process after its step, which does not affect the
    # measurement.
    taken = [float(line) for line in stamps.read_text().split()] if stamps.exists() else []
    if len(taken) != ranks:
        raise DadtError(f"{name}: {len(taken)} of {ranks} took a step: {done.stderr.decode(errors='replace')[-2000:]}")
    return max(taken) - begun
