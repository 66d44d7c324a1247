"""A job that trains on without a lost worker, and then loses the way between its hosts: this is named, not a rank."""

from __future__ import annotations

import re

import pytest
from harness.patience import await_that

TRAIN = """
import os, subprocess, time, torch
torch.set_num_threads(1)
rank = os.environ["RANK"]
model = torch.nn.Linear(100, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(100_000):
    optimizer.zero_grad(); model(torch.randn(8, 100)).pow(2).mean().backward(); optimizer.step()
    time.sleep(0.01)
    if step == 20:
        subprocess.run(["sh", "-c", f"echo {os.getpid()} >pid{rank}"], check=True)  # kept apart otherwise
    if os.path.exists("end"):
        os._exit(0)
"""
NOTICED = ("--timeout", "12", "--heartbeat-timeout", "3")
AFTERWARDS = ("--timeout", "6", "--heartbeat-timeout", "10")
"""Ranks give up waiting before it is known that their hosts hear nothing of each other."""
CUT = "h0 and h1 have heard nothing from each other over 10.7.0.1 (eth0) and 10.7.0.2 (eth0) for "


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("algorithm", "least", "patience"),
    [("pipe", 1, NOTICED), ("pipe", 3, AFTERWARDS), ("sync", 3, NOTICED), ("local", 1, AFTERWARDS)],
)
def test_a_cut_is_named(hosts, start, tmp_path, algorithm: str, least: int, patience: tuple[str, ...]) -> None:
    """least: with 3 nobody can train on."""
    network = hosts(2)
    options = ("-np", "4", "-H", network.list(2), "--min-np", least, "--executor", "tcp", *patience)
    run = start(network, TRAIN, *options, "--algorithm", algorithm, "--warmup-steps", "10", "train.py")
    (pid,) = run.wait_for("pid3")
    run.wait_for("pid0", "pid1", "pid2")
    events = tmp_path / "dadt-logs" / run.job / "events.jsonl"
    network[1].run("kill", "-KILL", pid)
    await_that(lambda: "3 of 4 workers train on from step" in events.read_text(), "the others")
    network.divide(network[0], network[1])
    if least == 1:
        await_that(lambda: "2 of 4 workers train on from step" in events.read_text(), "the others once more")
        (tmp_path / "end").touch()
    result = run.finish()
    assert "Traceback" not in result.err and not re.search("rank [012] .*was silent|worker [012] failed", result.err)
    assert f"dadt: warning: {CUT}" in result.err, result.err
    if least == 1:
        assert result.code == 0, result.err
        assert f"dadt: warning: h1: {CUT}" in result.err
        assert result.err.count("training goes on without") == 2, result.err
    else:
        assert result.code == 1, result.err
        assert re.search(r"^dadt: the way between h0 and h1 failed after [\d.]+ s, at step \d+", result.err, re.M)
        assert f"  cause   {CUT}" in result.err and "worker 3 was stopped" not in result.err
