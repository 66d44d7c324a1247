"""Adam's second moment stays at least the square of its momentum, by the C++ core's loop and without it; Adamax's
divisor stays at least its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dadt.train.confine import confine, confine_largest
from dadt.train.moment import moments_of
from dadt.train.prediction.rows import grouped


@pytest.mark.parametrize("in_core", [True, False], ids=["by the core", "of gradients in another memory order"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.5, 0.7)}], ids=str)
@pytest.mark.parametrize("skips", [None, 0.0, 1.0], ids=["no scaler", "finite", "left out"])
def test_v_is_at_least_the_square_of_the_momentum(in_core: bool, options: dict[str, Any], skips: float | None) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(33, 7))
    optimizer = torch.optim.Adam([parameter], lr=0.01, **options)
    for _ in range(3):
        parameter.grad = torch.randn(33, 7) if in_core else torch.randn(7, 33).t()
        optimizer.step()
    state = optimizer.state[parameter]
    state["exp_avg"].mul_(torch.rand_like(parameter) * 9)  # so that the square of some is larger than v
    before = state["exp_avg_sq"].clone()
    kept = before / (1 - optimizer.param_groups[0]["betas"][1] ** 3)
    ((moment, parameters),) = moments_of(optimizer)
    assert parameter.grad is not None
    groups, others = grouped([(state["exp_avg_sq"], state["exp_avg"], parameter.grad)])
    assert (len(groups), len(others)) == (in_core, not in_core)
    scaler = None if skips is None else torch.tensor(skips)
    confine(moment, parameters, [state], [parameter.grad], scaler)
    if skips:
        assert torch.equal(state["exp_avg_sq"], before)
        return
    optimizer.step()
    rest = 1 - moment.beta2**4
    m, v = state["exp_avg"], state["exp_avg_sq"] / rest
    larger = m.square() > kept
    assert larger.any() and not larger.all()
    torch.testing.assert_close(v, torch.where(larger, m.square(), kept))


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"foreach": True}], ids=str)
def test_adamax_divides_by_no_gradient_that_leads_to_a_momentum(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(33, 7))
    optimizer = torch.optim.Adamax([parameter], lr=0.01, **options)
    parameter.grad = torch.randn(33, 7)
    optimizer.step()
    state = optimizer.state[parameter]
    divisor, m = state["exp_inf"] * 0.999, state["exp_avg"].clone()
    parameter.grad = torch.randn(33, 7) * 20  # so that the momentum of some is larger than the divisor
    ((moment, _),) = moments_of(optimizer)
    weights = parameter.detach().clone()
    wanted = moment.old * m + moment.new * (moment.sign * parameter.grad + moment.decay * weights)
    larger = wanted.abs() > divisor
    assert larger.any() and not larger.all()
    with torch.no_grad():
        confine_largest(moment, parameter, state)
    optimizer.step()
    divisor = torch.where(larger, wanted.abs(), divisor)
    torch.testing.assert_close(state["exp_avg"], wanted)
    torch.testing.assert_close(state["exp_inf"], divisor)
    torch.testing.assert_close(parameter.detach(), weights - 0.01 / (1 - moment.old**2) * wanted / divisor)
