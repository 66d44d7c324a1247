"""Runs scripts under `dadt run`, as a user does, and collects what each rank found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

PRELUDE = """\
import os, sys
sys.path.insert(0, {here!r})
import torch
from torch import nn
torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def report(value):
    with open(os.path.join({folder!r}, f"rank{{rank}}.pt"), "wb") as f:
        torch.save(value, f)
"""


@dataclass
class Run:
    code: int
    output: str
    ranks: list[Any]

    def lines(self, prefix: str = "dadt: ") -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(prefix)]


@pytest.fixture
def dadt_run(tmp_path: Path):
    """dadt_run(script, *options, np=2) runs the script; whatever a rank gives to `report` is in Run.ranks."""

    def run(script: str, *options: str, np: int = 2, check: bool = True, timeout: float = 150) -> Run:
        path = tmp_path / "train.py"
        here = str(Path(__file__).parent)
        path.write_text(PRELUDE.format(here=here, folder=str(tmp_path)) + textwrap.dedent(script))
        command = [sys.executable, "-m", "dadt_cli", "run", "-np", str(np), *options, str(path)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        output = (done.stdout + done.stderr).decode(errors="replace")
        if check:
            assert done.returncode == 0, output
        files = [tmp_path / f"rank{r}.pt" for r in range(np)]
        return Run(done.returncode, output, [torch.load(f, weights_only=False) for f in files if f.exists()])

    return run
