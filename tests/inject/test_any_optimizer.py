"""Optimizers as people write them: what they need of gradients, loss, random numbers and memory is as alone."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from harness.checks import assert_replicas_equal
from torch import nn

KINDS = """
    import random
    from torch.optim import Optimizer

    class Lookahead(Optimizer):
        "Not made by Optimizer.__init__, with state from the start, and in a layout of its own."
        def __init__(self, parameters):
            self.base, self.n = torch.optim.AdamW(parameters, 0.01), 0
            self.param_groups, self.defaults = self.base.param_groups, self.base.defaults
            self.state = {p: {"slow": p.detach().clone()} for g in self.param_groups for p in g["params"]}
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
            self._patch_step_function()
        def zero_grad(self, set_to_none=True):
            self.base.zero_grad(set_to_none)
        def step(self, closure=None):
            self.base.step()
            self.n += 1
            if self.n % 4 == 0:
                for p, state in self.state.items():
                    p.data.copy_(state["slow"].lerp_(p.detach(), 0.5))
        def state_dict(self):
            return {"lookahead_state": [s["slow"] for s in self.state.values()], "base": self.base.state_dict()}

    class Own(Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.02})
        @property
        def parameters(self):
            return self.param_groups[0]["params"]
        def descend(self, rate=0.02):
            with torch.no_grad():
                for p in self.parameters:
                    p.sub_(rate * p.grad.clamp(-1, 1))   # fails where there is none

    class Noisy(Own):
        def step(self, closure=None):
            self.descend(0.02 * random.random())
            with torch.no_grad():
                for p in self.parameters:
                    p.add_(torch.randn_like(p), alpha=0.001)

    class Polyak(Own):
        "Its step follows from the loss."
        def step(self, closure):
            with torch.enable_grad():
                loss = closure()
            self.descend(0.02 * min(1.0, loss if isinstance(loss, float) else loss.item()))
            return loss

    class Given(Polyak):
        "The same, of a loss whose backward has been."

    class Sharpness(Own):
        def step(self, closure):
            before = [p.detach().clone() for p in self.parameters]
            self.descend(-0.05)
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                for p, old in zip(self.parameters, before):
                    p.copy_(old)
            self.descend()
            return loss

    class Within(Own):
        "Calls what it was given at each step, and runs the backward by itself."
        def step(self, closure=None):
            for rate in (-0.05, 0.05, 0.02):
                self.zero_grad()
                self.evaluate().backward()
                self.descend(rate)

    class Curved(Own):
        "By the curvature along a random direction."
        def step(self, closure=None):
            gradients = [p.grad for p in self.parameters]
            signs = [torch.randint_like(p, 2) * 2 - 1 for p in self.parameters]
            products = torch.autograd.grad(gradients, self.parameters, grad_outputs=signs)
            with torch.no_grad():
                for p, sign, product in zip(self.parameters, signs, products):
                    p.sub_(0.02 * p.grad / (1 + (sign * product).abs()))

    def train(kind):
        torch.manual_seed(0)
        random.seed(0)
        x = torch.randn(96, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        optimizer = kind(model.parameters())
        for batch in torch.utils.data.DataLoader(x, batch_size=8):
            def loss():
                return (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
            def closure():
                optimizer.zero_grad()
                value = loss()
                value.backward(create_graph=kind is Curved)
                return value
            optimizer.evaluate = loss
            if kind is Polyak:
                optimizer.step(closure)
            elif kind is Given:
                value = closure()
                optimizer.step(lambda: float(value))
            elif kind is Sharpness:
                closure()
                optimizer.step(closure)
            else:
                if kind is not Within:
                    closure()
                optimizer.step()
            for p in model.parameters():
                p.grad = None
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    kinds = (Lookahead, Noisy, Polyak, Given, Sharpness, Within, Curved)
    report({"state": {kind.__name__: train(kind) for kind in kinds}})
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {}
    exec(textwrap.dedent(KINDS), {"torch": torch, "nn": nn, "report": found.update})
    return found["state"]


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True, which makes a cycle of references
@pytest.mark.parametrize("algorithm", ["sync", "pipe"])
def test_they_train_as_alone(dadt_run, alone, algorithm: str) -> None:
    run = dadt_run(KINDS, "--batch", "global", "--algorithm", algorithm, "--warmup-steps", "4")
    assert_replicas_equal(run)
    late = ("Lookahead", "Noisy", "Polyak") if algorithm == "pipe" else ()
    for name, weights in alone.items():
        far = float((run.ranks[0]["state"][name] - weights).abs().max())
        assert (far > 1e-6) if name in late else (far < 1e-9), (name, far)
        assert far < 0.1, (name, far)
    for why in ("Sharpness is given a closure after a backward", "Within evaluates within its step"):
        assert f"dadt: {why}" in run.output
    assert "dadt: Curved differentiates its gradients" in run.output
    assert "weights" not in "".join(line for line in run.lines() if "differ" in line)


AFTERWARDS = """
    x = torch.randn(12 * 8, 3, generator=torch.Generator().manual_seed(1))

    def train(hooked):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer, steps = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
        def afterwards(*_):
            optimizer.zero_grad()
            steps.append(optimizer.state_dict()["dadt"]["step"])
        if hooked:
            optimizer.register_step_post_hook(afterwards)
        for batch in torch.utils.data.DataLoader(x, batch_size=8):
            (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
            if not hooked:
                afterwards()
        return torch.cat([torch.tensor(steps), *(p.detach().reshape(-1) for p in model.parameters())])

    report({"state": {"hooked": train(True), "behind": train(False)}})
"""


@pytest.mark.slow
def test_what_a_hook_after_the_step_does_is_as_what_the_code_behind_the_step_does(dadt_run) -> None:
    run = dadt_run(AFTERWARDS, "--batch", "global", "--algorithm", "pipe", "--warmup-steps", "4")
    assert_replicas_equal(run)
    hooked, behind = (run.ranks[0]["state"][name] for name in ("hooked", "behind"))
    assert torch.equal(hooked, behind)
    assert hooked[:12].tolist() == list(range(1, 13))
    assert ", none delayed" not in run.output


HOOKED = """
    class Fused(torch.optim.Optimizer):
        "As LOMO."
        def __init__(self, parameters):
            super().__init__(parameters, {{}})
            for p in self.param_groups[0]["params"]:
                def fused(given, p=p):
                    p.data.sub_({change})
                p.{hook}(fused)
        def step(self, closure=None):
            pass
    model = nn.Linear(3, 1)
    optimizer = Fused(model.parameters())
    for step in range(4):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "change"),
    [("register_post_accumulate_grad_hook", "p.grad"), ("register_hook", "given"), ("register_hook", "0 * given")],
)
def test_weights_that_change_within_the_backward_are_refused(dadt_run, hook: str, change: str) -> None:
    refused = not change.startswith("0")
    run = dadt_run(HOOKED.format(hook=hook, change=change), code=2 if refused else 0)
    assert ("Fused changes weights within the backward, before gradients are averaged" in run.output) is refused
