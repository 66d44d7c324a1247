"""Runs a script as ranks of `dadt run` or torchrun, or alone, and collects what each of them found."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PRELUDE = """\
import os, sys
{first}
import torch
torch.set_num_threads(1)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
def report(value):
    with open(os.path.join({folder!r}, f"rank{{rank}}.pt"), "wb") as file:
        torch.save(value, file)
"""
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "dadt run": lambda np: [sys.executable, "-m", "dadt_cli", "run", "-np", str(np)],
    "torchrun": lambda np: [str(BIN / "torchrun"), "--nproc-per-node", str(np)],
    "python": lambda np: [sys.executable],
}


@dataclass
class Run:
    code: int
    output: str
    ranks: list[Any]
    """What each gave to `report`."""


def run(
    folder: Path,
    script: str,
    *options: str,
    np: int = 2,
    launcher: str = "dadt run",
    code: int = 0,
    first: str = "import dadt",
    **env: str,
) -> Run:
    """first: what comes before `import torch`. code: the exit code that is expected."""
    path = folder / "train.py"
    path.write_text(PRELUDE.format(folder=str(folder), first=first) + textwrap.dedent(script))
    done = subprocess.run(
        [*LAUNCHERS[launcher](np), *options, str(path)],
        cwd=folder,
        capture_output=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    output = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == code, output
    files = [folder / f"rank{r}.pt" for r in range(np)]
    return Run(done.returncode, output, [torch.load(f, weights_only=False) for f in files if f.exists()])
