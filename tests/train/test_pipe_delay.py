"""Gradients that are several steps late: trajectories equal their definition, and a warning tells what is lost."""

from __future__ import annotations

import pytest
import torch
from checks import assert_equal
from scenarios import STEPS, WARMUP, simulate

from dadt.algorithms.pipe import stability
from dadt.train.prediction.displacement import auto_factors
from dadt.train.prediction.expectation import DAMPING, Expectation

NAMES = ("sgd", "momentum", "nesterov", "zero", "adam", "accumulate", "clip", "unused", "frozen")

SOME = f"""
    import gc, scenarios
    found = {{}}
    for name in {NAMES!r}:
        found[name] = scenarios.train(name, rank)
        gc.collect()
    report(found)
"""


@pytest.mark.parametrize("staleness", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_trajectories_equal_the_definition(dadt_run, staleness) -> None:
    """Staleness 1 is tested with all scenarios, in test_exactness.py."""
    torch.set_num_threads(1)
    run = dadt_run(SOME, "--staleness", str(staleness), "--warmup-steps", str(WARMUP))
    for name in NAMES:
        assert_equal(run.ranks[0][name], run.ranks[1][name], f"{name}: replicas")
        expected = simulate(name, 2, "pipe", staleness=staleness)
        assert_equal(run.ranks[0][name], expected, f"{name}: definition")
    delayed = (STEPS - WARMUP) * len(NAMES)
    assert f"{STEPS * len(NAMES)} steps, {delayed} of them delayed by {staleness}" in run.lines()[-1]
    assert f"warning: --staleness {staleness}: with momentum 0.9 learning rates are stable up to" in run.output
    assert "at staleness 1 and 3.8 with sync" in run.output


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_limits_are_the_closed_forms(momentum) -> None:
    assert stability.limit(momentum, 0, 0.0) == pytest.approx(2 * (1 + momentum), rel=1e-3)
    assert stability.limit(momentum, 1, 0.0) == pytest.approx(1 - momentum, rel=1e-3)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_limits_without_momentum(delay) -> None:
    expected = 2 * torch.sin(torch.tensor(torch.pi / (2 * (2 * delay + 1)))).item()
    assert stability.limit(0.0, delay, 0.0) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.95, 0.99])
def test_prediction_leaves_half_of_the_curvature(momentum) -> None:
    assert stability.limit(momentum, 1, 2 * momentum, -momentum) > 0.49
    assert stability.limit(momentum, 1, 2 * momentum, -momentum) > 1.3 * stability.limit(momentum, 1, 2.0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_the_limit_of_prediction_by_the_own_gradient(share, nesterov) -> None:
    """torch's optimizer on curvature 1, two ranks whose own gradients once were apart by noise."""

    def distance(rate: float) -> float:
        """Of the weights from the minimum, and of the ranks' gradients from each other."""
        w = torch.ones(1, dtype=torch.float64)
        optimizer = torch.optim.SGD([w], lr=rate, momentum=0.9, nesterov=nesterov)
        ranks = [Expectation(optimizer, [w], share) for _ in range(2)]
        in_flight = None
        for step in range(2000):
            own = []
            for prediction, noise in zip(ranks, (1.0, -1.0)):
                prediction.apply()
                own.append(w + (noise if step == 3 else 0.0))
                prediction.undo()
                w.grad = own[-1]
                prediction.before_step(late=step > 1, scale=None)
            mean = (own[0] + own[1]) / 2
            w.grad = mean if step == 0 else in_flight
            optimizer.step()
            for prediction in ranks:
                prediction.after_step(held=step == 1, scale=None)
            in_flight = mean if step else None
        return abs(w.item()) + abs((own[0] - own[1]).item())

    limit = stability.limit_by_own(0.9, share, DAMPING, nesterov=nesterov)
    assert distance(0.97 * limit) < 1e-3
    assert not distance(1.03 * limit) < 1.0


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_parabola_is_left_at_the_limit(delay, nesterov) -> None:
    """The optimizer of torch on curvature 1, late and ahead as `pipe` is."""

    def of(rate: float) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        w = torch.ones(1, dtype=torch.float64)
        return w, torch.optim.SGD([w], lr=rate, momentum=0.9, nesterov=nesterov)

    factor, older = auto_factors(of(1.0)[1], delay)

    def distance(rate: float) -> float:
        w, optimizer = of(rate)
        before, before_that, waiting = w.clone(), w.clone(), []
        for _ in range(4000):
            waiting.append(w + factor * (w - before) + older * (before - before_that))
            before, before_that = w.clone(), before
            w.grad = waiting.pop(0) if len(waiting) > delay else None
            optimizer.step()
        return abs(w.item())

    limit = stability.limit(0.9, delay, factor, older, nesterov=nesterov)
    assert distance(0.97 * limit) < 1e-3
    assert distance(1.03 * limit) > 1e3
