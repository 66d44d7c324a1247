"""A host dies, and the script that names the hosts knows of another: the job starts again there."""

from __future__ import annotations

import re

import pytest
from harness.patience import await_that

TRAIN = """
import hashlib, os, time, torch
restarts = os.environ["DADT_RESTARTS"]
model = torch.nn.Linear(100, 10); optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(40):
    optimizer.zero_grad(); model(torch.randn(8, 100)).pow(2).mean().backward(); optimizer.step()
    if step == 20 and restarts == "0":
        open("ready", "w").close()
        while not os.path.exists("go"): time.sleep(0.01)
print("restart", restarts, "weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def script(folder) -> str:
    path = folder / "hosts"
    path.write_text(f"#!/bin/sh\ncat {folder}/list\n")
    path.chmod(0o755)
    return str(path)


def restarted(out: bytes) -> dict[str, str]:
    """The host of each rank that trained to the end after one restart, with its weights."""
    return dict(re.findall(r"\[\d (\w+)\] restart 1 weights (\w+)", out.decode()))


@pytest.mark.slow
def test_a_restart_uses_the_hosts_that_there_are_then(hosts, start, tmp_path):
    network = hosts(3)
    (tmp_path / "list").write_text("h0:1\nh1:1\n")
    options = ("--max-restarts", "2", "--orphan-timeout", "3", "--start-timeout", "30", "--files", "all")
    run = start(network, TRAIN, "-np", "2", "--host-discovery-script", script(tmp_path), *options, "train.py")
    await_that((tmp_path / "ready").exists, "step 20")
    (tmp_path / "list").write_text("h0:1\nh2:1\n")
    network.cut(network[1])
    (tmp_path / "go").touch()
    result = run.finish()
    assert result.code == 0, result.err
    assert re.search(r"^dadt: warning: h1: no sign of life for 3 s; .*: restart 1 of 2$", result.err, re.M), result.err
    weights = restarted(result.out)
    assert weights.keys() == {"h0", "h2"}
    assert len(set(weights.values())) == 1
