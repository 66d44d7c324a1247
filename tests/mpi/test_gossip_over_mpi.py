"""Gossip over MPI."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from harness import TESTS
from harness.gossip_script import AVERAGE, PRELUDE, assert_averaged
from harness.run import Run

pytest.importorskip("mpi4py")

REPORT = f"""\
import os, sys
sys.path.append({str(TESTS)!r})
import torch
from torch import nn
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def report(value):
    with open(f"rank{{rank}}.pt", "wb") as f:
        torch.save(value, f)
"""


@pytest.mark.parametrize(
    ("mpirun", "size", "compression"),
    [
        ("mpirun.openmpi", 3, "none"),
        pytest.param("mpirun.openmpi", 3, "int8", marks=pytest.mark.slow),
        pytest.param("mpirun.mpich", 4, "none", marks=pytest.mark.slow),
    ],
    indirect=["mpirun"],
)
def test_the_mean_stays_over_mpi(mpirun: str, size: int, compression: str, tmp_path: Path) -> None:
    script = REPORT + textwrap.dedent(PRELUDE + AVERAGE)
    options = ["--algorithm", "gossip", "--compression", compression, "--executor", "mpi", "--mpirun", mpirun]
    result = Run(tmp_path, script, [*options, "-np", str(size), "train.py"], {"OMP_NUM_THREADS": "1"}).finish()
    assert result.code == 0, result.err
    assert "dadt: gossip: " in result.err
    assert ("less than uncompressed" in result.err) == (compression != "none")
    assert_averaged([torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(size)])
