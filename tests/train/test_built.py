"""What ranks have built, compared before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dadt.comm import plain
from dadt.errors import Mismatch
from dadt.train import built


def build(
    kind: Any = torch.optim.SGD, width: int = 4, step_size: int = 0, change: Any = None, load: bool = False, **made: Any
) -> built.Build:
    """What a rank tells, as others read it. change: made to the optimizer once it is built."""
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    optimizer = kind(model.parameters(), **{"lr": 0.1, **made})
    was = built.made(optimizer)
    schedulers = []
    if step_size:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size)
        schedulers.append((built.scheduler(scheduler), scheduler.last_epoch))
    if change:
        change(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    told = built.encoded(built.build(optimizer, names, was, schedulers, restored=load))
    return built.decoded(plain.decode(plain.encode(told, "a build")))


def double(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p.double() for p in group["params"]]


def named(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["name"] = "all"


DIFFERENT = {
    "class": ({"kind": torch.optim.Adam}, "the optimizer is Adam on rank 2 and SGD on rank 0: each has chosen"),
    "value": ({"momentum": 0.9}, "momentum in group 0 of SGD is 0.9 on rank 2 and 0 on rank 0: each has chosen"),
    "shape": ({"width": 5}, r"0.weight is \(5, 3\) float32 on rank 2 and \(4, 3\) float32 on rank 0: every rank must"),
    "dtype": ({"change": double}, r"parameter 0 is \(4, 3\) float64 on rank 2 and \(4, 3\) float32 on rank 0"),
    "key": ({"change": named}, "what group 0 of SGD holds is .*name.* on rank 2 and .* on rank 0"),
    "late": ({"change": lambda o: o.param_groups[0].update(lr=0.7)}, "lr in group 0 of SGD is 0.7 on rank 2 and 0.1"),
    "scheduler": ({"step_size": 3}, "scheduler 0 is StepLR on rank 2 and none on rank 0: each has chosen"),
    "frozen": (
        {"change": lambda o: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})},
        "the number of parameters is 5 on rank 2 and 4 on rank 0: every rank must build the same model",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_told_with_both_values(what: str) -> None:
    given, text = DIFFERENT[what]
    with pytest.raises(Mismatch, match=text):
        built.check([build(), build(), build(**given)], [0, 1, 2], "")
    built.check([build(**given), build(**given)], [0, 1], "")


def test_schedulers_of_one_class_are_compared() -> None:
    with pytest.raises(Mismatch, match="step_size of StepLR is 4 on rank 1 and 3 on rank 0"):
        built.check([build(step_size=3), build(step_size=4)], [0, 1], "")


def test_state_that_one_rank_has_loaded_is_none_of_what_is_built() -> None:
    def load(optimizer: torch.optim.Optimizer) -> None:
        saved = torch.optim.SGD([torch.zeros(1)], lr=0.003, momentum=0.5).state_dict()["param_groups"][0]
        optimizer.param_groups[0].update({k: v for k, v in saved.items() if k != "params"}, initial_lr=0.1)

    built.check([build(change=load, load=True), build()], [0, 1], "")
    with pytest.raises(Mismatch, match="weight_decay"):
        built.check([build(change=load, load=True), build(weight_decay=0.1)], [0, 1], "")


def test_parameters_in_another_order() -> None:
    def turn(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"].reverse()

    with pytest.raises(Mismatch, match=r"another order than rank 0, 1.bias in the place of 0.weight: give the"):
        built.check([build(), build(change=turn)], [0, 1], "")


def test_a_rank_may_wrap_its_model() -> None:
    a, b = build(), build()
    b = b._replace(parameters=[(f"module.{name}", kind) for name, kind in b.parameters])
    built.check([a, b], [0, 1], "")
    with pytest.raises(Mismatch, match=r"the name of parameter 0 is other on rank 1 and 0.weight on rank 0"):
        built.check([a, b._replace(parameters=[("other", b.parameters[0][1]), *b.parameters[1:]])], [0, 1], "")
