"""optimizer.step(closure): late as without one where it is called once, and told where it is not."""

from __future__ import annotations

import pytest
from harness.checks import assert_equal, assert_replicas_equal
from harness.job import joined

MODEL = """
    from harness.scenarios import batch, mlp, snapshot
    def train(make, closed, accumulated=False, clipped=False):
        torch.manual_seed(0)
        model = mlp()
        optimizer = make(model.parameters())
        def compute(step, zero=True):
            x, y = batch(rank, step, 0)
            loss = nn.functional.cross_entropy(model(x), y)
            if zero:
                optimizer.zero_grad()
            loss.backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss
        for step in range(12):
            if accumulated:
                compute(100 + step)
            if closed:
                loss = optimizer.step(lambda: compute(step, zero=not accumulated))
            else:
                loss = compute(step, zero=not accumulated)
                optimizer.step()
        return {**snapshot(model, optimizer), "loss": loss.detach()}
    OPTIMIZERS = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    }
"""
KINDS = (
    MODEL
    + "    report({name: [train(make, closed) for closed in (False, True)] for name, make in OPTIMIZERS.items()})\n"
)
AROUND = (
    MODEL
    + """
    make = OPTIMIZERS["SGD"]
    report({
        "accumulated": [train(make, closed, accumulated=True) for closed in (False, True)],
        "clipped": [train(make, closed, clipped=True) for closed in (False, True)],
    })
"""
)


@pytest.mark.parametrize("algorithm", ["pipe", "sync", "local"])
def test_a_closure_changes_no_bit(dadt_run, algorithm) -> None:
    run = dadt_run(joined(kinds=KINDS, around=AROUND), "--algorithm", algorithm, "--warmup-steps", "4")
    for script in ("kinds", "around"):
        for rank in run.of(script).ranks:
            for name, (without, closed) in rank.items():
                assert_equal(without, closed, name)
    if algorithm == "pipe":
        assert "120 steps, 80 of them delayed by one, " in run.output


TWICE = """
    class Twice(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                closure()
            super().step()
            with torch.enable_grad():
                return closure()
"""
SHARPNESS = """
    class Sharpness(torch.optim.SGD):
        "As SAM (arXiv:2010.01412): up the gradient, another evaluation, back, and down that one's."
        @torch.no_grad()
        def step(self, closure):
            parameters = self.param_groups[0]["params"]
            before = [p.detach().clone() for p in parameters]
            for p in parameters:
                p.add_(p.grad, alpha=0.05)
            with torch.enable_grad():
                loss = closure()
            for p, old in zip(parameters, before):
                p.copy_(old)
            super().step()
            return loss
"""
AHEAD = """
    class Ahead(torch.optim.SGD):
        "As the schedule-free ones that take a closure: evaluates at another point than the weights."
        def step(self, closure):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(1.01)
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss
"""
LINES = """
    from harness.scenarios import batch, mlp, snapshot
    torch.manual_seed(0)
    model = mlp()
    optimizer = {name}(model.parameters(), lr=0.01)
    for step in range(12):
        x, y = batch(rank, step, 0)
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss
        {before}
        optimizer.step(closure)
    report({{"state": snapshot(model)}})
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("", "torch.optim.LBFGS", "LBFGS evaluates its closure more than once in a step"),
        (TWICE, "Twice", "Twice evaluates its closure more than once in a step"),
        (SHARPNESS, "Sharpness", "Sharpness is given a closure after a backward"),
        (AHEAD, "Ahead", "Ahead changes weights before it evaluates its closure"),
    ],
)
def test_what_evaluates_by_itself_is_averaged_at_once_and_told(dadt_run, text, name, why) -> None:
    before = "closure()" if name == "Sharpness" else ""
    run = dadt_run(text + LINES.format(name=name, before=before), "--warmup-steps", "4")
    assert_replicas_equal(run)
    assert run.output.count(f"dadt: {why}: gradients and loss of each evaluation are averaged at once") == 1
    assert f"12 steps, none delayed ({why}), " in run.output


SOMETIMES = """
    class Sometimes(torch.optim.SGD):
        steps = 0
        def step(self, closure):
            self.steps += 1
            for _ in range(1 + (self.steps > 8)):
                with torch.enable_grad():
                    loss = closure()
                super().step()
            return loss
"""


@pytest.mark.slow
def test_what_evaluates_again_only_later_is_found_then(dadt_run) -> None:
    run = dadt_run(SOMETIMES + LINES.format(name="Sometimes", before=""), "--warmup-steps", "4")
    assert_replicas_equal(run)
    told = "(Sometimes evaluates its closure more than once in a step), "
    assert f"12 steps, 5 of them delayed by one {told}" in run.output


@pytest.mark.slow
def test_a_closure_that_is_not_called_is_refused(dadt_run) -> None:
    never = "    class Never(torch.optim.SGD):\n        def step(self, closure):\n            return super().step()\n"
    run = dadt_run(never + LINES.format(name="Never", before=""), code=1)
    assert "DadtError: Never.step did not call the closure that it was given" in run.output


def test_the_last_line_says_why_no_step_was_late(dadt_run) -> None:
    run = dadt_run(LINES.format(name="torch.optim.SGD", before=""), "--warmup-steps", "20")
    assert "12 steps, none delayed (the first 20 steps are synchronous), " in run.output
