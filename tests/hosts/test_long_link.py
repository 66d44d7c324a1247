"""Jobs over the interface of a VPN, which is long, loses packets, and takes short ones only."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.patience import PATIENCE
from harness.run import write_script

from benchmarks.long_link import LongLink

TRAIN = """
import hashlib, torch
model = torch.nn.Linear(1000, 500)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    optimizer.zero_grad(); model(torch.randn(8, 1000)).pow(2).mean().backward(); optimizer.step()
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


@pytest.fixture
def link(network_possible: None, tmp_path: Path) -> Iterator[LongLink]:
    link = LongLink(tmp_path, mbit=200, round_trip=0.05, loss=0.001, mtu=1280)
    yield link
    link.close()


def run(link: LongLink, folder: Path, *more: str) -> tuple[str, str]:
    """What the first of two hosts, on which `dadt run` is called by hand, has printed."""
    dadt = write_script(folder, TRAIN)
    where = f"{link.addresses[0]}:29400"
    flags = ["--nnodes", "2", "--rendezvous", where, "-np", "2", "-v", *more]
    nodes = [
        subprocess.Popen(
            [*host, *dadt, "run", *flags, "--node-rank", str(number), "train.py"],
            cwd=folder,
            env={**os.environ, "DADT_SECRET": "what only the nodes of this job know"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, host in enumerate(link.hosts)
    ]
    try:
        (out, err), (_, said) = (each.communicate(timeout=PATIENCE) for each in nodes)
    finally:
        for each in nodes:
            each.kill()
            each.communicate()
    assert [each.returncode for each in nodes] == [0, 0], err + said
    weights = re.findall(r"weights (\w+)", out)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    return out, err


def test_a_long_link_has_several_connections(link: LongLink, tmp_path: Path) -> None:
    _, err = run(link, tmp_path)
    found = re.search(
        r"^dadt: rank 1 has (\d+) TCP connections with rank 0 for data \((\S+) Mbit/s, (\S+) ms\)$", err, re.MULTILINE
    )
    assert found, err
    count, mbit, milliseconds = int(found[1]), float(found[2]), float(found[3])
    assert 1 < count <= 16
    assert 10 < mbit < 300  # of 200; where a packet is lost, what came after it is acknowledged late and at once
    assert 45 < milliseconds < 200


@pytest.mark.slow
def test_as_many_connections_as_were_asked_for(link: LongLink, tmp_path: Path) -> None:
    _, err = run(link, tmp_path, "--streams", "3")
    assert "TCP connections" not in err
