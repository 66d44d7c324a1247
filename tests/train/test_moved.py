"""Modules that are moved between two steps, with gradients in place: averages come to where they are looked for."""

from __future__ import annotations

import pytest
from harness.checks import assert_equal

MOVED = """
    from harness.scenarios import batch
    from torch.nn.functional import cross_entropy

    def train(away):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(24):
            x, y = batch(rank, step, 0)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if away and step % 3 == 0:
                model.double().float()
            if away and step % 5 == 0:
                model[2].share_memory()
        return {name: value.clone() for name, value in model.state_dict().items()}

    report([train(False), train(True)])
"""


@pytest.mark.parametrize("algorithm", ["pipe", "sync"])
def test_there_and_back(dadt_run, algorithm: str) -> None:
    """With the same weights as where nothing was moved."""
    run = dadt_run(MOVED, "--algorithm", algorithm, "--warmup-steps", "4")
    for undisturbed, moved in run.ranks:
        assert_equal(undisturbed, moved, algorithm)
    assert_equal(run.ranks[0][1], run.ranks[1][1], "replicas")
