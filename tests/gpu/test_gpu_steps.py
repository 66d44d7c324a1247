"""A step over NCCL never makes the host wait for the GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
@pytest.mark.parametrize(("device", "executor"), [pytest.param("cuda", "nccl", marks=pytest.mark.gpu), ("cpu", "shm")])
def test_a_step_waits_for_no_gpu(device: str, executor: str, algorithm: str) -> None:
    """On the CPU, where nothing can be waited for, the script below is seen to work."""
    command = [sys.executable, str(Path(__file__).with_name("steps.py")), device, executor, algorithm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and done.stdout.endswith("DONE\n"), done.stdout + done.stderr
