"""Shared memory inside hosts and Gloo between them: training, the bytes on the wire, and a rank that dies."""

from __future__ import annotations

import pytest
from executor_figures import bytes_on_the_wire
from test_job import words

TRAIN = """
import hashlib, torch
model = torch.nn.Linear(300, 100); optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(8):
    optimizer.zero_grad(); model(torch.randn(8, 300)).pow(2).mean().backward(); optimizer.step()
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("slots", [pytest.param("h0:2,h1:2", marks=pytest.mark.slow), "h0:2,h1:1"])
def test_auto_trains_the_same_weights_everywhere(hosts, start, slots):
    network = hosts(2)
    count = sum(int(part[-1]) for part in slots.split(","))
    arguments = ("-np", count, "-H", slots, "-v", "--warmup-steps", 4, "-x", "OMP_NUM_THREADS=1", "train.py")
    result = start(network, TRAIN, *arguments).finish()
    assert result.code == 0, result.err
    assert "executor hierarchical:tcp: there are 2 hosts with " in result.err
    weights = {line[-1] for line in words(result.out) if "weights" in line}
    assert len(weights) == 1, result.out


def test_shm_over_two_hosts_is_refused(hosts, start):
    network = hosts(2)
    result = start(network, TRAIN, "-np", 2, "-H", network.list(1), "--executor", "shm", "train.py").finish()
    assert result.code == 2
    assert "--executor shm: works on one host only, not on 2" in result.err


@pytest.mark.slow
def test_each_byte_crosses_once(hosts):
    """Less cannot cross; a ring through all four ranks moves 1.5 times as much."""
    network = hosts(2)
    assert 0.95 < bytes_on_the_wire(network, "hierarchical:tcp", "dadt") < 1.1


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job(hosts, start):
    network = hosts(2)
    script = TRAIN.replace("range(8)", "range(100000)").replace(
        "    optimizer.zero_grad()",
        "    if step == 5 and os.environ['RANK'] == '3': os._exit(7)\n    optimizer.zero_grad()",
    )
    result = start(network, "import os" + script, "-np", 4, "-H", network.list(2), "train.py").finish()
    assert result.code == 7, result.err
    assert "worker 3" in result.err
