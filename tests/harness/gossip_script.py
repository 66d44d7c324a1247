"""A training by gossip in which only averages change the weights, and what must come of it."""

from __future__ import annotations

from typing import Any

import torch

PRELUDE = """
    import os, signal, time
    from pathlib import Path
    from dadt.inject import worker
    from harness.patience import await_that

    def gossip():
        return worker.runtime.attachment(optimizer).algorithm

    def all_told(what):
        # Each rank has made the file of this name.
        return all(Path(f"{what}{r}").exists() for r in range(world))

    def step(seconds=0.002):
        optimizer.zero_grad()
        model(torch.randn(2, 7)).sum().backward()
        time.sleep(seconds)  # what a step takes, without a core for each rank
        optimizer.step()

    def scatter():
        # From here on the ranks have different weights, which only averaging changes.
        model(torch.randn(2, 7))
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 30), nn.BatchNorm1d(30), nn.Linear(30, 9000), nn.Linear(9000, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
"""
AVERAGE = """
    starts = scatter()
    steps = 0
    while not all_told("enough"):
        step()
        steps += 1
        if gossip().exchanges >= 25:
            Path(f"enough{rank}").touch()
    near = [p.detach().clone() for p in model.parameters()]
    own = model[1].running_var.clone()
    worker.runtime.close()
    report({"starts": starts, "near": near, "end": [p.detach() for p in model.parameters()], "steps": steps,
            "own": own, "joint": model[1].running_var})
"""


def assert_averaged(ranks: list[dict[str, Any]]) -> None:
    """The exact average of what the ranks began with, on all of them."""
    for i, _ in enumerate(ranks[0]["starts"]):
        mean = torch.stack([r["starts"][i].double() for r in ranks]).mean(0)
        for r in ranks:
            torch.testing.assert_close(r["end"][i].double(), mean, atol=1e-4, rtol=0)
            assert torch.equal(r["end"][i], ranks[0]["end"][i])
