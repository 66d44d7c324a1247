"""Optimizers that are none of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.checks import assert_equal, assert_replicas_equal
from torch import nn

from dadt.errors import DadtError
from dadt.inject.foreign import Carrier

MOMENTUM = """
import torch
class Momentum:
    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.moved = list(parameters), lr, {}
    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            if p.grad is not None:
                moved = self.moved.setdefault(p, torch.zeros_like(p))
                p.sub_(moved.mul_(0.9).add_(p.grad), alpha=self.lr)
"""
MADE = """
    class Plain:
        '''As people write them, with the groups of torch's.'''
        def __init__(self, parameters, lr):
            self.param_groups = [{{"params": list(parameters), "lr": lr}}]
        def zero_grad(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.detach_()
                        p.grad.zero_()
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"])

    class Listed:
        '''As fastai's.'''
        class L:
            def __init__(self, items):
                self.items = items
        def __init__(self, parameters, lr):
            self.param_lists, self.rate = self.L([self.L(list(parameters))]), lr
        def all(self):
            return [p for one in self.param_lists.items for p in one.items]
        def zero_grad(self):
            for p in self.all():
                p.grad = None
        def step(self):
            for p in self.all():
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-self.rate)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = {optimizer}(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
    report({{"state": model.state_dict()}})
"""
KINDS = ("torch.optim.SGD", "Plain", "Listed")


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
def test_they_train_as_torch_s_own_do(dadt_run, algorithm) -> None:
    weights = {}
    for kind in KINDS:
        run = dadt_run(MADE.format(optimizer=kind), "--algorithm", algorithm, "--warmup-steps", "10")
        assert_replicas_equal(run)
        weights[kind] = run.ranks[0]["state"]
        late = "none delayed" if algorithm == "sync" else "30 of them delayed by one"
        assert f": 40 steps, {late}" in run.output
        told = f"{kind} is none of torch's optimizers: averaged at its step all the same"
        assert (told in run.output) is (kind != KINDS[0])
    if algorithm == "sync":
        for kind in KINDS[1:]:
            assert_equal(weights[KINDS[0]], weights[kind], kind)


PLAIN = """
    import gc, weakref
    class Plain:
        def __init__(self, parameters):
            self.parameters = list(parameters)
        def zero_grad(self):
            for p in self.parameters:
                p.grad = None
        @torch.no_grad()
        def step(self):
            for p in self.parameters:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.05)
"""
FOLDS = (
    PLAIN
    + """
    def fold(number):
        model = nn.Linear(4, 1)
        optimizer = Plain(model.parameters())
        generator = torch.Generator().manual_seed(10 * number + rank)
        for step in range(10):
            x = torch.randn(8, 4, generator=generator)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
        return model.state_dict(), weakref.ref(optimizer)

    states, optimizers = zip(*map(fold, range(3)))
    gc.collect()
    report({"state": {f"{i} {k}": v for i, s in enumerate(states) for k, v in s.items()},
            "kept": sum(ref() is not None for ref in optimizers)})
"""
)


def test_one_that_is_built_later_is_averaged_as_well(dadt_run) -> None:
    """As in cross-validation. None outlives its fold."""
    run = dadt_run(FOLDS, "--algorithm", "sync")
    assert_replicas_equal(run)
    assert [rank["kept"] for rank in run.ranks] == [0, 0]
    assert "Plain is none of torch's optimizers: averaged at its step all the same" in run.output


STAGES = (
    PLAIN
    + """
    torch.manual_seed(0)
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    generator = torch.Generator().manual_seed(rank)
    def train(optimizer):
        for step in range(10):
            x = torch.randn(8, 4, generator=generator)
            optimizer.zero_grad()
            (head(body(x)) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
    MADE
    train(first)
    body.requires_grad_(True)
    train(second)
    report({"state": {**body.state_dict(), **{"head." + k: v for k, v in head.state_dict().items()}}})
"""
)


@pytest.mark.parametrize(
    "stages",
    [
        "first, second = Plain(head.parameters()), Plain([*body.parameters(), *head.parameters()])",
        "first, second = Plain(head.parameters()), Plain(head.parameters())",
        "first = second = Plain([*body.parameters(), *head.parameters()]); body.requires_grad_(False)",
    ],
    ids=["more", "again", "thawed"],
)
def test_parameters_may_have_had_another_optimizer_or_have_been_frozen(dadt_run, stages) -> None:
    run = dadt_run(STAGES.replace("MADE", stages), "--algorithm", "sync")
    assert_replicas_equal(run)


def test_a_closure_is_refused(dadt_run) -> None:
    run = dadt_run(MADE.format(optimizer="Plain").replace("optimizer.step()", "optimizer.step(lambda: 0)"), code=1)
    assert "Plain.step was given a closure: DADT averages before the step" in run.output


def test_what_they_remember_travels() -> None:
    """To a rank that has stayed behind, into the tensors that the optimizer has there."""
    made: dict[str, Any] = {}
    exec(MOMENTUM, made)
    optimizers, carriers = [], []
    for rank in range(2):
        parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
        optimizers.append(made["Momentum"](parameters, 0.1))
        carriers.append(Carrier(optimizers[-1], parameters))
        carriers[-1].run = optimizers[-1].step
        for p in parameters:
            p.grad = torch.full_like(p, rank + 1.0)
        carriers[-1].step()
    behind = list(optimizers[0].moved.values())
    carriers[0].load_state_dict(carriers[1].state_dict())
    assert [t.unique().tolist() for t in behind] == [[2.0], [2.0]]
    with pytest.raises(DadtError, match="the state of Momentum is that of another optimizer"):
        Carrier(made["Momentum"](parameters, 0.1), parameters).load_state_dict(carriers[1].state_dict())


def test_no_snapshots_are_taken_of_them(launch) -> None:
    training = """
model = torch.nn.Linear(4, 1)
optimizer = Momentum(model.parameters(), 0.01)
for step in range(30):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
    done = launch(MOMENTUM + training, "-np", "2", "--snapshot-every", "5steps", "train.py")
    assert done.code == 0, done.err
    assert "dadt: warning: no snapshots are taken, as they could not hold the state of such an optimizer" in done.err
    resumed = launch(MOMENTUM + training, "-np", "2", "--resume", done.job, "train.py")
    assert resumed.code == 2, resumed.err
