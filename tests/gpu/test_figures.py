"""The figures' program with tensors of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import forkserver
from harness.patience import PATIENCE

PROGRAM = str(Path(__file__).parents[1] / "benchmarks" / "executor.py")


@pytest.mark.gpu
@pytest.mark.parametrize(("executor", "against", "ranks"), [("nccl", "nccl", 1), ("shm", "gloo", 2)])
def test_a_row_for_each_size(executor: str, against: str, ranks: int, tmp_path: Path) -> None:
    options = ["--device", "cuda", "--against", against, "--sizes", "4096,1048576", "--seconds", "0.5"]
    where = ["--np", str(ranks), "--store", str(tmp_path / "store")]
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAM, executor, "--rank", str(rank), *where, *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [each.communicate(timeout=PATIENCE)[0] for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    rows = json.loads(outputs[0].splitlines()[-1])
    assert [row["bytes"] for row in rows] == [4096, 1048576]
    assert all(row["dadt"]["median"] > 0 and row["library"]["median"] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("options", "said"),
    [(["--device", "cuda"], "needs a CUDA device"), (["--against", "nccl"], "moves tensors of GPUs only")],
)
def test_what_cannot_be_measured_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store")]
    command = [forkserver.python(), PROGRAM, "shm", *store, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and said in done.stderr
