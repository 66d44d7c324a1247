"""Accuracy on real data: what one step of delay costs, and what prediction gives back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS
from harness.patience import PATIENCE

SCRIPT = SCRIPTS / "digits.py"


def accuracy(folder: Path, *options: str) -> tuple[float, str]:
    """Mean over three seeds on the 2,000 test digits, and all output. Deterministic: seeds fix everything."""
    command = [sys.executable, "-m", "dadt_cli", "run", "-np", "2", "--batch", "global", "--warmup-steps", "40"]
    done = subprocess.run(
        [*command, "--log-dir", str(folder), *options, str(SCRIPT), "--lr", "0.1", "--seeds", "3"],
        capture_output=True,
        timeout=5 * PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    found = re.findall(r"accuracy (0\.\d+)", output)
    assert len(found) == 2 and len(set(found)) == 1, output  # both ranks read the same
    return float(found[0]), output


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_pipe_loses_little_and_prediction_recovers_most(tmp_path: Path) -> None:
    sync, _ = accuracy(tmp_path, "--algorithm", "sync")
    plain, _ = accuracy(tmp_path, "--predict", "0")
    pipe, output = accuracy(tmp_path)
    assert "900 steps, 780 of them delayed by one" in output
    assert sync > 0.96
    assert sync - pipe <= 0.01
    assert pipe - plain >= 0.5 * (sync - plain)
