"""The next step that prediction computes is the one that the optimizer then takes."""

from __future__ import annotations

import pytest
import torch

from dadt.train.prediction.expectation import Expectation
from dadt.train.prediction.next_step import known

ADAM = {"lr": 0.01, "betas": (0.8, 0.95)}
SGD = {"lr": 0.1, "momentum": 0.9}
WAYS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd, decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, SGD),
    "dampening, decay": (torch.optim.SGD, {**SGD, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov, decay": (torch.optim.SGD, {**SGD, "nesterov": True, "weight_decay": 0.1}),
    "momentum, maximize, decay": (torch.optim.SGD, {**SGD, "maximize": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, ADAM),
    "adam, decay": (torch.optim.Adam, {**ADAM, "weight_decay": 0.1}),
    "adam, maximize, decay": (torch.optim.Adam, {**ADAM, "maximize": True, "weight_decay": 0.1}),
    "adamw, rate in a tensor": (torch.optim.AdamW, {**ADAM, "lr": torch.tensor(0.01), "foreach": False}),
    "adamw": (torch.optim.AdamW, {**ADAM, "weight_decay": 0.1}),
    "adamw, fused": (torch.optim.AdamW, {**ADAM, "weight_decay": 0.1, "fused": True}),
}
KINDS = {
    "float32": lambda: torch.randn(7, 5),
    "float64": lambda: torch.randn(7, 5, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(7, 5).bfloat16(),
    "by columns": lambda: torch.randn(5, 7).t(),
    "with holes": lambda: torch.randn(7, 10)[:, ::2],
    "complex": lambda: torch.randn(7, 5, dtype=torch.complex64),
}


def begun(way: str, kind: str) -> tuple[torch.Tensor, torch.optim.Optimizer, Expectation]:
    """A parameter after three steps, whose gradient in flight is known: `.grad`."""
    torch.manual_seed(1)
    make, options = WAYS[way]
    w = KINDS[kind]().requires_grad_()
    optimizer = make([w], **options)
    prediction = Expectation(optimizer, [w], share=1.0)
    own = in_flight = torch.randn_like(w)
    for step in range(4):
        own, in_flight = torch.randn_like(w), own
        w.grad = own
        prediction.before_step(late=step > 1, scale=None)
        w.grad = [own, None, in_flight, in_flight][step]  # the first late step applies nothing
        optimizer.step()
        prediction.after_step(held=step == 1, scale=None)
    w.grad = own
    return w, optimizer, prediction


# torch's fused step takes neither complex numbers nor holes.
@pytest.mark.parametrize(
    ("way", "kind"), [(w, k) for w in WAYS for k in KINDS if "fused" not in w or k not in ("complex", "with holes")]
)
def test_the_step_is_foreseen(way: str, kind: str) -> None:
    w, optimizer, prediction = begun(way, kind)
    before = w.detach().clone()
    prediction.apply()
    ahead = w.detach().clone()
    prediction.undo()
    assert torch.equal(w, before)
    assert not torch.equal(ahead, before)
    optimizer.step()
    tolerance = {"rtol": 0.02, "atol": 0.02} if kind == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ahead, w.detach(), **tolerance)


def test_a_parameter_without_gradients_stays_where_it_is() -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([used, unused], lr=0.1)
    prediction = Expectation(optimizer, [used, unused], share=0.9)
    for step in range(4):
        used.grad = torch.ones(3)
        prediction.before_step(late=step > 1, scale=None)
        used.grad = None if step == 1 else used.grad
        optimizer.step()
        prediction.after_step(held=step == 1, scale=None)
    prediction.apply()
    assert not torch.equal(used, torch.ones(3)) and torch.equal(unused, torch.ones(3))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.Adam(p), True),
        (lambda p: torch.optim.Adam(p, amsgrad=True), False),
        (lambda p: torch.optim.NAdam(p), False),
        (lambda p: type("Renamed", (torch.optim.AdamW,), {})(p), True),
        (lambda p: type("Own", (torch.optim.SGD,), {"step": lambda self, closure=None: None})(p, lr=0.1), False),
    ],
)
def test_whose_step_is_known(make, expected: bool) -> None:
    assert known(make([torch.ones(3, requires_grad=True)])) is expected


def test_averages_that_the_script_throws_away_harm_nobody() -> None:
    w, optimizer, prediction = begun("adam", "float32")
    w.grad = torch.randn_like(w)
    prediction.before_step(late=True, scale=None)
    prediction.arrived(torch.tensor(1.0, dtype=torch.float64))
    w.grad = None  # zero_grad(), and a step all the same
    optimizer.step()
    prediction.after_step(held=False, scale=None)
    before = w.detach().clone()
    prediction.apply()
    assert w.isfinite().all() and not torch.equal(w, before)


def test_an_infinity_in_flight_predicts_nothing() -> None:
    w, _, prediction = begun("adam", "float32")
    before = w.detach().clone()
    prediction.join({w: torch.full_like(w, torch.inf)}, None)
    prediction.apply()
    assert torch.equal(w, before)


def test_what_was_forgotten_within_a_step_is_predicted_again_two_steps_later() -> None:
    """As where ranks took over rank 0's weights in the middle of it."""
    w, optimizer, prediction = begun("adam", "float32")
    moved = []
    for forgets in (True, False, False):
        w.grad = torch.randn_like(w)
        prediction.before_step(late=True, scale=None)
        if forgets:
            prediction.forget()
        optimizer.step()
        prediction.after_step(held=False, scale=None)
        before = w.detach().clone()
        prediction.apply()
        moved.append(not torch.equal(w, before))
        prediction.undo()
    assert moved == [False, True, True]
