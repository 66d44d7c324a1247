"""What optimizers under `local` meet in scripts: parameters trained in turn, a learning rate of 0, no momentum, weights
of 16 bits."""

from __future__ import annotations

import pytest
import torch
from harness.job import joined

OPTIONS = ["--algorithm", "local", "--warmup-steps", "4", "--sync-every", "8", "--overlap-steps", "0"]
IN_TURN = """
    some, others = (nn.Parameter(torch.zeros(16, 16)) for _ in range(2))
    optimizer = torch.optim.AdamW([some, others], lr=1e-3)
    for step in range(84):
        optimizer.zero_grad()
        (some if step % 4 == 0 else others).sum().backward()
        optimizer.step()
    report([optimizer.state[p]["exp_avg"].mean().item() for p in (some, others)])
"""
WITHOUT_MOMENTUM = """
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.{optimizer}
    for step in range(120):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    report([bool(p.isfinite().all()) for p in model.parameters()])
"""
SHARED = """
    weights = nn.Parameter(torch.zeros(16, 16))
    fast, slow = torch.optim.Adam([weights], lr=1e-2), torch.optim.Adam([weights], lr=1e-4)
    for step in range(84):
        for optimizer in (fast, slow):
            optimizer.zero_grad()
            weights.sum().backward()
            optimizer.step()
    report([optimizer.state[weights]["exp_avg"].mean().item() for optimizer in (fast, slow)])
"""
NARROW = """
    weights = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([weights], lr=1e-5)
    for step in range(84):
        optimizer.zero_grad()
        weights.sum().backward()
        optimizer.step()
    report(optimizer.state[weights]["exp_avg"].float().mean().item())
"""


def test_momentum_is_that_of_the_steps_of_a_parameter(dadt_run) -> None:
    """Weights of 16 bits do not show their progress, which is below a half of their last place."""
    run = dadt_run(joined(turn=IN_TURN, shared=SHARED, narrow=NARROW), *OPTIONS)
    for means in run.of("shared").ranks:
        assert means == pytest.approx([1.0, 1.0], rel=0.05)
    for some, others in run.of("turn").ranks:
        assert some == pytest.approx(1 - 0.9**21, rel=0.05)
        assert others == pytest.approx(1 - 0.9**63, rel=0.05)
    for mean in run.of("narrow").ranks:
        assert mean == pytest.approx(1.0, rel=0.05)


def test_without_momentum_each_rank_keeps_its_own_moments(dadt_run) -> None:
    names = {
        "adamax": "Adamax(model.parameters(), betas=(0.0, 0.99))",
        "adam": "Adam(model.parameters(), betas=(0.5, 0.99))",
    }
    text = joined(**{name: WITHOUT_MOMENTUM.format(optimizer=optimizer) for name, optimizer in names.items()})
    run = dadt_run(text, *OPTIONS)
    own = "computes from gradients stays each rank's own, since"
    assert f"what Adamax {own} Adamax has no momentum" in run.output
    assert f"what Adam {own} Adam has a beta1 of 0.5, and 0.8 is the least" in run.output
    for name in names:
        assert run.of(name).ranks == [[True, True]] * 2, name


def test_outer_momentum_ends_with_the_learning_rate(dadt_run) -> None:
    run = dadt_run(
        """
        weights = nn.Parameter(torch.ones(8))
        optimizer = torch.optim.SGD([weights], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 68))
        seen = {}
        for step in range(160):
            optimizer.zero_grad()
            (weights * (rank + 1.0)).sum().backward()
            optimizer.step()
            schedule.step()
            seen[step] = weights.detach().clone()
        report([seen[100], seen[159]])
        """,
        *(*OPTIONS, "--outer-lr", "0.7", "--outer-momentum", "0.9"),
    )
    for then, last in run.ranks:
        assert torch.equal(then, last)
