"""The next step that prediction computes is the one that the optimizer then takes."""

from __future__ import annotations

import pytest
import torch
from harness.next_step import PAIRS, begun, foresees

from dadt.train.prediction.expectation import Expectation
from dadt.train.prediction.next_step import known
from dadt.train.prediction.rows import LastColumns, by_kind


@pytest.fixture(params=["by memory", "in place"])
def place(request, monkeypatch) -> None:
    """Predicted weights are in other memory, or made where the parameters are, as on a GPU."""
    if request.param == "in place":
        monkeypatch.setattr(Expectation, "_on_gpu", True)


@pytest.mark.parametrize(("way", "kind"), PAIRS)
def test_the_step_is_foreseen(way: str, kind: str, place: None) -> None:
    foresees(way, kind)


def test_a_parameter_without_gradients_stays_where_it_is(place: None) -> None:
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


def test_averages_that_the_script_throws_away_harm_nobody(place: None) -> None:
    w, optimizer, prediction = begun("adam", "float32")
    w.grad = torch.randn_like(w)
    prediction.before_step(late=True, scale=None)
    prediction.arrived(None)
    w.grad = None  # zero_grad(), and a step all the same
    optimizer.step()
    prediction.after_step(held=False, scale=None)
    before = w.detach().clone()
    prediction.apply()
    assert w.isfinite().all() and not torch.equal(w, before)


def test_an_infinity_in_flight_predicts_nothing(place: None) -> None:
    w, _, prediction = begun("adam", "float32")
    before = w.detach().clone()
    prediction.join({w: torch.full_like(w, torch.inf)}, None)
    prediction.apply()
    assert torch.equal(w, before)


def test_what_was_forgotten_within_a_step_is_predicted_again_two_steps_later(place: None) -> None:
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


def test_strides_of_dimensions_of_size_1_keep_nothing_from_the_fast_loops() -> None:
    """A 1x1 convolution's gradient and its weight may differ in them."""
    weight = torch.ones(8, 4, 1, 1).to(memory_format=torch.channels_last)
    gradient = torch.ones(8 * 4).as_strided((8, 4, 1, 1), (4, 1, 1, 1))
    assert weight.stride() != gradient.stride()
    seen, others = LastColumns(), [torch.ones(8, 4, 1, 1).as_strided((8, 4, 1, 1), (1, 8, 1, 1)), torch.ones(32)]
    for _ in range(2):
        assert by_kind([(weight, gradient)], seen)[1] == []
    assert all(len(by_kind([(weight, other)], seen)[1]) == 1 for other in others)


def test_a_clipping_is_told_though_the_script_takes_gradients_away() -> None:
    """They differ by a factor of a thousand, so those of one set say nothing of another one's."""
    weights = [torch.zeros(3, requires_grad=True) for _ in range(20)]
    prediction = Expectation(torch.optim.SGD(weights, lr=0.1), weights, share=1.0)
    for i, w in enumerate(weights):
        w.grad = torch.full((3,), 1000.0 ** (i % 2))
    prediction.arrived(None)
    for w in weights:
        assert w.grad is not None
        w.grad.mul_(0.25)
    weights[0].grad = weights[5].grad = None
    assert prediction._clipped() == pytest.approx(0.25)
