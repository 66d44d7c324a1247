"""Describes how optimizers of torch update their momentum and second moment."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from dadt.comm.shards import is_sharded

_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


class Moment(NamedTuple):
    """Describes how the optimizer updates the momentum of one param_group: m = old * m + new * gradient."""

    old: float
    new: float
    sign: float
    """-1 with the optimizer's option `maximize`, which inverts the sign of the gradient; otherwise 1."""
    decay: float
    """Weight decay: factor of the weights that the optimizer adds to the gradient."""
    first: str
    """Name of the momentum in the optimizer's state."""
    beta2: float
    """Factor of the second moment v in its update; 0 if the optimizer has none."""
    fades: float = 0.0
    """Factor in each step of the largest gradient, by which Adamax divides in place of the root of v; otherwise 0."""


def unsuited(optimizer: torch.optim.Optimizer) -> str:
    """Return the reason why DADT cannot compute with the optimizer's moments; empty if it can."""
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    if any(is_sharded(p) for g in groups for p in g["params"]):
        return f"{name} trains parts of tensors"
    step = inspect.unwrap(type(optimizer).step)
    if is_sgd(optimizer):
        return ""
    if step not in [inspect.unwrap(each.step) for each in _ADAMS]:
        return f"the step of {name} is not known"
    if is_adamax(optimizer) and not all(g["betas"][1] for g in groups):
        return f"{name} forgets its largest gradient at once"
    if any(g.get("amsgrad") for g in groups):
        return f"{name} has amsgrad"
    if any(p.is_complex() for g in groups for p in g["params"]):
        return f"{name} trains complex numbers"
    return ""


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each step of all parameters of this SGD or Adam is made of earlier gradients, too."""
    if is_sgd(optimizer):
        return all(g["momentum"] and g["dampening"] < 1 for g in optimizer.param_groups)
    return all(g["betas"][0] for g in optimizer.param_groups)


def is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step is that of torch's SGD."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.SGD.step)


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each step of the optimizer is proportional to its momentum over the root of v."""
    return inspect.unwrap(type(optimizer).step) in [inspect.unwrap(each.step) for each in _ADAMS[:2]]


def is_adamax(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer divides by the largest gradient so far, which fades, in place of the root of v."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Adamax.step)


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Moment, list[torch.Tensor], float]]:
    """Yield for each param_group how its momentum is updated, its parameters, and its learning rate."""
    for group in optimizer.param_groups:
        sign = -1.0 if group.get("maximize") else 1.0
        decay, rate = float(group["weight_decay"]), float(group["lr"])
        if "betas" in group:
            beta1, beta2 = map(float, group["betas"])
            decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
            divisor = (0.0, beta2) if is_adamax(optimizer) else (beta2, 0.0)
            moment = Moment(beta1, 1 - beta1, sign, 0.0 if decoupled else decay, "exp_avg", *divisor)
        else:
            new = 1 - float(group["dampening"])
            moment = Moment(float(group["momentum"]), new, sign, decay, "momentum_buffer", 0.0)
        yield moment, group["params"], rate


def forget_others(known: MutableMapping[torch.Tensor, Any], parameters: Container[torch.Tensor]) -> None:
    """Remove all other parameters from `known`."""
    for p in [p for p in known if p not in parameters]:
        del known[p]


def beside(value: Any, tensor: torch.Tensor) -> Any:
    """Return `value`; if it is a tensor, moved to the device of `tensor`."""
    return value.to(tensor.device) if isinstance(value, torch.Tensor) and value.device != tensor.device else value


def wide(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor with at least 32 bits per value."""
    assert tensor is not None
    return tensor.detach().float() if tensor.element_size() == 2 else tensor.detach()
