"""Two optimizers, and a gradient scaler, against simulators of their own: nothing of dadt is used in those."""

from __future__ import annotations

import pytest
import torch
from harness.checks import assert_equal, assert_near
from harness.job import Run, joined
from harness.losses import STEPS, fool, judge, loss_of, optimizers
from harness.scenarios import mlp, snapshot
from torch import nn

WARMUP = 5

ADVERSARIAL = """
    from harness import losses as t
    from harness.scenarios import snapshot
    torch.manual_seed(rank)
    G, D = nn.Linear(6, 6), nn.Linear(6, 1)
    g, d = t.optimizers(G, D)
    for step in range(t.STEPS):
        d.zero_grad()
        fake = t.judge(G, D, rank, step)
        d.step()
        g.zero_grad()
        t.fool(D, fake)
        g.step()
    report({"G": snapshot(G, g), "D": snapshot(D, d)})
"""


FACTOR, OLDER = 1.0, -0.5


class Delayed:
    """One optimizer of one simulated training: delay 1, predicted by displacements, by definition."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.displacement: list[torch.Tensor] | None = None
        self.older = [torch.zeros_like(p) for p in self.parameters]
        self.pending: list[torch.Tensor] | None = None
        self.true = self.copy()
        self.step = 0

    def copy(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def set(self, values: list[torch.Tensor]) -> None:
        for p, v in zip(self.parameters, values):
            p.data.copy_(v)

    def predict(self) -> None:
        if self.step > WARMUP and self.displacement is not None:
            known = zip(self.true, self.displacement, self.older)
            self.set([t + (OLDER * o).add_(d, alpha=FACTOR) for t, d, o in known])

    def apply(self, gradients: list[list[torch.Tensor]]) -> None:
        """gradients: by rank."""
        self.set(self.true)
        mean = [sum(parts[1:], parts[0]) / len(parts) for parts in zip(*gradients)]
        arrived = mean
        if self.step >= WARMUP:
            arrived, self.pending = self.pending, mean
        if arrived is not None:
            for p, m in zip(self.parameters, arrived):
                p.grad = m
            self.optimizer.step()
            self.older = self.displacement or self.older
            self.displacement = [p.detach() - t for p, t in zip(self.parameters, self.true)]
            self.true = self.copy()
        self.step += 1

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.parameters]


def test_two_optimizers_equal_their_definition(shared) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    G, D = nn.Linear(6, 6), nn.Linear(6, 1)
    g, d = map(Delayed, optimizers(G, D))
    for step in range(STEPS):
        fakes, parts = [], []
        g.predict()
        d.predict()
        for rank in range(2):
            D.zero_grad()
            fakes.append(judge(G, D, rank, step))
            parts.append(d.gradients())
        d.apply(parts)
        parts = []
        d.predict()
        for fake in fakes:
            G.zero_grad()
            fool(D, fake)
            parts.append(g.gradients())
        g.apply(parts)
    d.set(d.true)
    for rank in shared.of("adversarial").ranks:
        assert_equal(rank["G"], snapshot(G, g.optimizer), "generator")
        assert_equal(rank["D"], snapshot(D, d.optimizer), "discriminator")


SCALED = """
    from harness import losses as t
    from harness.scenarios import mlp, snapshot
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    for step in range(t.STEPS):
        scaler.scale(t.loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    report(snapshot(model, optimizer))
"""


@pytest.fixture(scope="module")
def shared(shared_run) -> Run:
    options = ("--warmup-steps", str(WARMUP), "--predict", f"{FACTOR},{OLDER}")
    return shared_run(joined(adversarial=ADVERSARIAL, scaled=SCALED), *options)


def test_a_scaler_equals_its_definition(shared) -> None:
    """Scales are powers of two, so a scaled training differs from an unscaled one only by the step left out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp()
    one = Delayed(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for step in range(STEPS):
        one.predict()
        parts = []
        for rank in range(2):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            parts.append(one.gradients())
        if one.pending is not None and not all(g.isfinite().all() for g in one.pending):
            # The infinity has arrived: the step is left out, and with it what was known of the displacement.
            one.set(one.true)
            one.pending = [sum(p[1:], p[0]) / 2 for p in zip(*parts)]
            one.displacement = None
            one.older = [torch.zeros_like(p) for p in one.parameters]
            one.step += 1
        else:
            one.apply(parts)
    for state in shared.of("scaled").ranks:
        assert_equal(state, snapshot(model, one.optimizer), "scaled")


SCALED_OR_NOT = """
    from harness import losses as t
    from harness.scenarios import batch, mlp, snapshot
    def train(scaler, clip):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(t.STEPS):
            x, y = batch(rank, step, 0)
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return snapshot(model, optimizer)
    scaled = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    plain = torch.amp.GradScaler("cpu", enabled=False)
    report([train(scaled, 0.1), train(plain, 0.1), train(plain, 1e9)])
"""


@pytest.mark.slow
def test_what_is_expected_is_scaled_and_clipped_as_the_averages_are(dadt_run) -> None:
    run = dadt_run(SCALED_OR_NOT, "--warmup-steps", str(WARMUP))
    for scaled, plain, not_clipped in run.ranks:
        assert_near(scaled, plain, "scaled")
        assert max(float((plain[name] - not_clipped[name]).abs().max()) for name in plain) > 1e-2
    for of_one, of_other in zip(*(rank for rank in run.ranks)):
        assert_equal(of_one, of_other, "replicas")
