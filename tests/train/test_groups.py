"""Values of param_groups: what ranks compare, and take from each other."""

from __future__ import annotations

import pytest
import torch

from dadt.train.param_groups import group_values, take_values

MADE = {
    "SGD": [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.3}],
    "AdamW": [{"betas": (0.9, 0.99)}, {"betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True}],
    "Adafactor": [{"eps": (None, 1e-3)}, {"eps": (1e-8, 1e-2), "d": 2.0, "beta2_decay": -0.5}],
    "Rprop": [{"etas": (0.5, 1.2)}, {"etas": (0.4, 1.1), "step_sizes": (1e-5, 10)}],
}


def plain(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("name", MADE)
def test_all_that_a_step_reads_is_taken(name):
    kind = getattr(torch.optim, name)
    mine, theirs = (kind([torch.zeros(3), torch.zeros(1)], **given) for given in MADE[name])
    parameters = mine.param_groups[0]["params"]
    assert plain(mine) != plain(theirs) and group_values(mine) != group_values(theirs)
    take_values(mine, group_values(theirs))
    assert plain(mine) == plain(theirs) == group_values(theirs)
    assert mine.param_groups[0]["params"] is parameters and parameters[1].equal(torch.zeros(1))


def test_tensors_stay_the_script_s_own():
    rates = [torch.tensor(0.1), torch.tensor(0.2)]
    betas = [(torch.tensor(0.9), torch.tensor(0.99)), (torch.tensor(0.8), torch.tensor(0.9))]
    mine, theirs = (torch.optim.SGD([torch.zeros(3)], lr=rate) for rate in rates)
    mine.param_groups[0]["betas"], theirs.param_groups[0]["betas"] = betas
    take_values(mine, group_values(theirs))
    assert mine.param_groups[0]["lr"] is rates[0] and float(rates[0]) == float(rates[1])
    assert mine.param_groups[0]["betas"][1] is betas[0][1] and betas[0] == betas[1]


def test_what_cannot_be_compared_is_left_alone():
    mine, theirs = (torch.optim.SGD([torch.zeros(3)], lr=0.1) for _ in range(2))
    own = mine.param_groups[0]["of the script"] = object()
    theirs.param_groups[0]["of the script"] = object()
    assert group_values(mine) == group_values(theirs)
    take_values(mine, group_values(theirs))
    assert mine.param_groups[0]["of the script"] is own
