"""Gradients that grow are noticed by hooks, which go with the optimizer that they are for."""

from __future__ import annotations

import torch
from torch import nn

from dadt.train.growth import Growth


def test_optimizers_that_are_gone_leave_no_hook() -> None:
    parameter = nn.Parameter(torch.ones(2))
    told = []
    for number in range(3):
        growth = Growth()
        growth.told = lambda _, number=number: told.append(number)
        growth.watch([parameter])
        parameter.sum().backward()
        assert growth.seen
        del growth
    assert told == [0, 1, 2]
    assert not parameter._post_accumulate_grad_hooks
