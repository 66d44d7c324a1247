"""`dadt bench MODEL` over several machines: its workers are told when it is their turn across the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.machine import Network
from harness.patience import PATIENCE


@pytest.mark.slow
def test_workers_of_two_machines_train_in_turn(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    network = hosts(2)
    command = [sys.executable, "-m", "dadt_cli", "bench", "mlp", "-np", 2, "-H", network.list(1), "--against", "ddp"]
    command += ["--batch-size", 2, "--steps", 1, "--rounds", 2, "--json", tmp_path / "a.json"]
    home = {"HOME": str(network.launcher.home), "DADT_SSH_CONFIG": str(network.config)}
    done = subprocess.run(
        network.launcher.enter(command, tmp_path),
        env={**os.environ, **home},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["name"], len(row["rates"])) for row in found] == [
        ("1 worker", 1),
        ("plain", 2),
        ("null (limit)", 2),
        ("pipe", 2),
        ("ddp", 2),
    ]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_sharded_model_is_averaged_between_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dadt_cli", "bench", "fsdp", "-np", "4", "--simulate-hosts", "2", "--steps", "1"]
    command += ["--contenders", "pipe,hsdp,fsdp", "--batch-size", "1", "--rounds", "2", "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["rows"]
    assert [(row["name"], row["ranks"]) for row in found] == [("plain", 4), ("pipe", 4), ("hsdp", 4), ("fsdp", 4)]
