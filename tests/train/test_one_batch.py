"""Optimizers over tensors that are made for one batch train for each rank alone, and leave what trains as it is."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_equal
from harness.job import joined

DATA = """
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(36, 6), torch.arange(36) % 3, torch.arange(36))
    loader = DataLoader(samples, batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    def noted(ids, values): return dict(zip(ids.tolist(), values.detach().clone()))
"""

PERTURBED = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = {}
    for epoch in range(2):
        for x, y, ids in loader:
            delta = torch.zeros_like(x, requires_grad=True)
            inner = torch.optim.SGD([delta], lr=0.1)
            for _ in range(1 + int(ids[0]) % 3 if epoch else 2):      # another number of steps on each rank
                inner.zero_grad()
                (-cross_entropy(model(x + delta), y, reduction="sum")).backward()
                inner.step()
            if not epoch:
                found |= noted(ids, delta)
            optimizer.zero_grad()
            cross_entropy(model(x + delta.detach()), y).backward()
            optimizer.step()
    report({"tensors": found, "state": {k: v.clone() for k, v in model.state_dict().items()}})
"""

LATENTS = """
    model.requires_grad_(False)
    for epoch in range(3):
        found = {}
        for x, y, ids in loader:
            latents = [torch.zeros(len(x), 2, 3, requires_grad=True), torch.ones(len(x), 1, requires_grad=True)]
            inner = torch.optim.Adam(latents, lr=0.1)
            for _ in range(4):
                inner.zero_grad()
                (model((latents[0].flatten(1) + x) * latents[1]) - x[:, :3]).pow(2).sum().backward()
                inner.step()
            found |= noted(ids, torch.cat([latents[0].flatten(1), latents[1]], 1))
    report({"tensors": found, "state": {}})
"""

MODELS_WITHIN = """
    first = torch.optim.SGD(model.parameters(), lr=0.05)
    built = []
    for epoch in range(3):
        for x, y, ids in loader:
            first.zero_grad()
            cross_entropy(model(x), y).backward()
            first.step()
            if not built:
                by_hand = [torch.zeros(6, len(x), requires_grad=True), torch.zeros(len(x), requires_grad=True)]
                layer = nn.Linear(6, len(x))
                built = [torch.optim.Adam(parameters, lr=0.1) for parameters in (by_hand, layer.parameters())]
            for each in built:
                each.zero_grad()
            (layer(x).pow(2).mean() + (x @ by_hand[0] + by_hand[1] - 1).pow(2).mean()).backward()
            for each in built:
                each.step()
    late = [p for each in built for group in each.param_groups for p in group["params"]]
    report({"tensors": {}, "state": {str(i): p.detach().clone() for i, p in enumerate(late)}})
"""

SCRIPTS = joined(perturbed=DATA + PERTURBED, latents=DATA + LATENTS, models=DATA + MODELS_WITHIN)


def test_each_rank_optimizes_its_own(dadt_run) -> None:
    run = dadt_run(SCRIPTS, "--algorithm", "sync", "--batch", "global")
    alone = dadt_run(SCRIPTS, launcher="python", np=1)
    assert len(run.lines("dadt: SGD is left alone: its tensors are made for one batch")) == 1
    assert len(run.lines("dadt: Adam is left alone: its tensors are made for one batch")) == 1
    for name in ("perturbed", "latents", "models"):
        assert_equal(*(found["state"] for found in run.of(name).ranks))
    for name in ("perturbed", "latents"):
        ranks, (expected,) = run.of(name).ranks, alone.of(name).ranks
        found = ranks[0]["tensors"] | ranks[1]["tensors"]
        assert found.keys() == expected["tensors"].keys()
        for key, value in expected["tensors"].items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")
    perturbed = run.of("perturbed").ranks
    assert perturbed[0]["tensors"].keys().isdisjoint(perturbed[1]["tensors"])


@pytest.mark.slow
def test_a_model_beside_them_trains_one_step_late(dadt_run) -> None:
    run = dadt_run(SCRIPTS, "--algorithm", "pipe", "--warmup-steps", "3")
    for name in ("perturbed", "models"):
        assert_equal(*(found["state"] for found in run.of(name).ranks))
