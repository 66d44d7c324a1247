"""The simulator of the convergence figures gives the bits of real workers; what is reported is computed right."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))
from benchmarks.convergence.family import FAMILIES  # noqa: E402
from benchmarks.convergence.method import Method  # noqa: E402
from benchmarks.convergence.simulator import Simulation  # noqa: E402
from benchmarks.convergence.train import digest  # noqa: E402

WARMUP = 4


def real(folder: Path, family: str, algorithm: list[str], ranks: int, rate: float, steps: int) -> list[dict[str, Any]]:
    """What each rank of a real training found."""
    dadt = [sys.executable, "-m", "dadt_cli", "run", "-np", ranks, "--batch", "global", "--warmup-steps", WARMUP]
    script = ["-m", "benchmarks.convergence.train", "--family", family, "--rate", rate, "--steps", steps]
    command = [*dadt, "--log-dir", folder, *algorithm, *script, "--seed", 3, "--out", folder, "--rank", "{rank}"]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def simulated(family: str, method: str, ranks: int, rate: float, steps: int) -> tuple[dict[str, Any], str]:
    shortened = dataclasses.replace(FAMILIES[family], steps=steps)
    simulation = Simulation(shortened, Method.parse(method), ranks, rate, 3)
    found = simulation.run()
    return found, digest(simulation.model, simulation.optimizer)


def compare(folder: Path, family: str, method: str, flags: list[str], ranks: int, rate: float, steps: int) -> None:
    found, bits = simulated(family, method, ranks, rate, steps)
    for rank, outcome in enumerate(real(folder, family, flags, ranks, rate, steps)):
        assert outcome["digest"] == bits, f"rank {rank}"
        assert outcome["loss"] == found["loss"]
        assert outcome["accuracy"] == found["accuracy"]


@pytest.mark.parametrize(
    ("family", "method", "flags"),
    [
        ("cnn", f"pipe:warmup={WARMUP}", []),
        ("cnn", "sync", ["--algorithm", "sync"]),
        ("gpt", f"pipe:warmup={WARMUP}", []),
    ],
)
def test_two_workers_have_the_bits_of_the_simulator(
    tmp_path: Path, family: str, method: str, flags: list[str]
) -> None:
    compare(tmp_path, family, method, flags, 2, 0.01, 12)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["sync", "plain", "pipe"])
def test_whole_trainings_have_the_bits_of_the_simulator(tmp_path: Path, family: str, method: str, ranks: int) -> None:
    flags = {"sync": ["--algorithm", "sync"], "plain": ["--predict", "0"], "pipe": []}[method]
    steps = 40 if family == "gpt" else FAMILIES[family].steps
    timed = method if method == "sync" else f"{method}:warmup={WARMUP}"
    compare(tmp_path, family, timed, flags, ranks, FAMILIES[family].rates[1], steps)
