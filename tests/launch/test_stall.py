"""What a user is told, and gets, where a rank does not come to an exchange."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from harness.run import Result

SCRIPT = """
import os, time, torch
from pathlib import Path
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def late():
    logs = Path("dadt-logs")
    told = {
        "warn": lambda: any("waits in step 10" in path.read_text() for path in logs.glob("*/events.jsonl")),
        "dump": lambda: any("in late" in path.read_text() for path in logs.glob("*/rank1.stacks")),
        "abort": lambda: False,
    }
    while not told[os.environ["DADT_ON_STALL"]](): time.sleep(0.01)
for step in range(20):
    if step == 10 and os.environ["DADT_RANK"] == "1":
        late()
    optimizer.zero_grad()
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
"""
ARGUMENTS = ("-np", "2", "--stall-warning", "0.5", "--warmup-steps", "100")
LONGER = ("--stall-warning", "5")
"""For tests in which a slow step before the tenth may not count."""


@pytest.mark.parametrize("how", ["warn", pytest.param("dump", marks=pytest.mark.slow)])
def test_a_late_rank_is_told_of_and_waited_for(launch: Callable[..., Result], how: str) -> None:
    result = launch(SCRIPT, *ARGUMENTS, "--on-stall", how, *LONGER * (how == "dump"), "train.py")
    assert result.code == 0, result.err
    assert "rank 0 waits in step 10, bucket 0 (1.bias and 3 more): rank 1 at step 10" in result.err
    stacks = sorted(path.name for path in (result.logs / result.job).glob("*.stacks"))
    assert stacks == (["rank0.stacks", "rank1.stacks"] if how == "dump" else [])
    if how == "dump":
        assert "in late" in (result.logs / result.job / "rank1.stacks").read_text()


def test_a_late_rank_ends_the_job_where_that_is_wanted(launch: Callable[..., Result]) -> None:
    result = launch(SCRIPT, *ARGUMENTS, "--on-stall", "abort", *LONGER, "train.py")
    assert result.code == 1
    assert "CommTimeout: rank 0 waits in step 10, bucket 0 (1.bias and 3 more)" in result.err
    assert "in late" in (result.logs / result.job / "rank1.stacks").read_text()


@pytest.mark.slow
def test_a_stopped_rank_is_told_of_and_is_the_cause(launch: Callable[..., Result]) -> None:
    stop = SCRIPT.replace("        late()", "        os.kill(os.getpid(), 19)")
    result = launch(stop, *ARGUMENTS, "--stall-warning", "2", "--timeout", "5", "train.py")
    assert result.code == 1, result.err
    [pid] = {int(found) for found in re.findall(r"kill -CONT (\d+) lets it go on", result.err)}
    assert f"rank 0 waits in step 10, bucket 0 (1.bias and 3 more): rank 1 is stopped (SIGSTOP, pid {pid}" in result.err
    block = result.err[result.err.index("dadt: worker 1 failed (stopped) after ") :]
    assert f"  host    this host, pid {pid}, log " in block
    assert "  cause   it was stopped (SIGSTOP), and the others waited for it\n" in block
    assert "signal 9" not in result.err
    stacks = (result.logs / result.job / "rank1.stacks").read_text()
    assert stacks == f"process {pid} did not answer within 2 s: it is stopped"
    assert 'train.py", line ' in (result.logs / result.job / "rank0.stacks").read_text()


@pytest.mark.slow
def test_a_rank_that_is_stopped_when_all_others_have_ended_is_the_cause(launch: Callable[..., Result]) -> None:
    """Nobody waits for it in an exchange any more."""
    result = launch(
        "import atexit, os\nif os.environ['RANK'] == '1': atexit.register(os.kill, os.getpid(), 19)\n"
        + SCRIPT.replace("        late()", "        pass"),
        *("-np", "2", "--timeout", "5", "--executor", "gloo", "train.py"),
    )
    assert result.code == 1, result.err
    assert "dadt: worker 1 failed (stopped) after " in result.err
    assert "  cause   it was stopped (SIGSTOP), and the others waited for it\n" in result.err
