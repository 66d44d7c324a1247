"""A script of DistributedDataParallel over several machines, whose ranks meet in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import SCRIPTS
from harness.host_run import HostRun
from harness.machine import Network

SCRIPT = SCRIPTS / "ddp.py"


@pytest.mark.slow
def test_ranks_that_meet_in_a_file(
    hosts: Callable[[int], Network], start: Callable[..., HostRun], tmp_path: Path
) -> None:
    network = hosts(2)
    meet = ["--init", f"file://{tmp_path}/meet", "--rank", "{rank}", "--world_size", "{world_size}"]
    flags = ["-H", network.list(1), "--warmup-steps", "2"]
    done = start(network, SCRIPT.read_text(), *flags, "train.py", "--out", tmp_path, *meet).finish()
    assert done.code == 0, done.err + done.out.decode()
    assert "averaged by --algorithm pipe in its place" in done.err
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name, value in ranks[0].items():
        assert torch.equal(value, ranks[1][name]), name
