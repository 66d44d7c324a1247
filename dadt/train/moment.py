"""Describes how optimizers update their momentum and second moment."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from dadt.comm.shards import is_sharded
from dadt.train.stand_in import StandIn, name_of

_LEAST_BETA1 = 0.8
"""Least beta1 of an Adam whose v is kept at least m^2 (`confine`). With a shorter momentum m^2 is the square of few
gradients, and v would be as large as the largest of these: with 0.5 steps are 0.4 to 0.8 times as long."""
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
    name = name_of(optimizer)
    groups = optimizer.param_groups
    if any(is_sharded(p) for g in groups for p in g["params"]):
        return f"{name} trains parts of tensors"
    if isinstance(optimizer, StandIn):
        return optimizer.unsuited
    step = inspect.unwrap(type(optimizer).step)
    if any(p.is_complex() for g in groups for p in g["params"]):
        return f"{name} trains complex numbers"
    if is_sgd(optimizer):
        return ""
    if step not in [inspect.unwrap(each.step) for each in _ADAMS]:
        return f"the step of {name} is not known"
    if is_adamax(optimizer) and not all(g["betas"][1] for g in groups):
        return f"{name} forgets its largest gradient at once"
    if any(g.get("amsgrad") for g in groups):
        return f"{name} has amsgrad"
    return ""


def lacks_momentum(optimizer: torch.optim.Optimizer) -> str:
    """Return why the steps of this SGD or Adam are not made of enough earlier gradients; empty if they are."""
    moments = [moment for moment, _ in moments_of(optimizer)]
    if not all(m.old and m.new > 0 for m in moments):
        return f"{name_of(optimizer)} has no momentum"
    beta1 = min((m.old for m in moments if m.beta2), default=1.0)
    if beta1 < _LEAST_BETA1:
        return f"{name_of(optimizer)} has a beta1 of {beta1:g}, and {_LEAST_BETA1} is the least"
    return ""


def is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step is that of torch's SGD."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.SGD.step)


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each step of the optimizer is proportional to its momentum over the root of v."""
    return inspect.unwrap(type(optimizer).step) in [inspect.unwrap(each.step) for each in _ADAMS[:2]]


def is_adamax(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer divides by the largest gradient so far, which fades, in place of the root of v."""
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Adamax.step)


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Moment, list[torch.Tensor]]]:
    """Yield for each param_group how its momentum is updated, and its parameters."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, StandIn):
            beta1, beta2 = optimizer.betas
            yield Moment(beta1, 1 - beta1, 1.0, 0.0, "exp_avg", beta2), group["params"]
            continue
        sign, decay = -1.0 if group.get("maximize") else 1.0, float(group["weight_decay"])
        if "betas" in group:
            beta1, beta2 = map(float, group["betas"])
            decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
            divisor = (0.0, beta2) if is_adamax(optimizer) else (beta2, 0.0)
            moment = Moment(beta1, 1 - beta1, sign, 0.0 if decoupled else decay, "exp_avg", *divisor)
        else:
            new = 1 - float(group["dampening"])
            moment = Moment(float(group["momentum"]), new, sign, decay, "momentum_buffer", 0.0)
        yield moment, group["params"]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each param_group."""
    if isinstance(optimizer, StandIn):
        return [optimizer.rate] * len(optimizer.param_groups)
    return [float(group["lr"]) for group in optimizer.param_groups]


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the parameter's momentum, second moment and number of steps by the names that torch's optimizers give
    them; empty before the first step."""
    if isinstance(optimizer, StandIn):
        return optimizer.moments(parameter)
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    return state


def sizes_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, float]:
    """Return for each parameter with a second moment its sum, without bias; with Adamax that of the squares by which
    it divides."""
    sizes: dict[torch.Tensor, float] = {}
    for moment, parameters in moments_of(optimizer):
        for p in parameters:
            state = state_of(optimizer, p)
            if moment.beta2 and "exp_avg_sq" in state:
                age = int(state["step"])
                sizes[p] = float(state["exp_avg_sq"].sum()) / (1 - moment.beta2**age) if age else 0.0
            elif moment.fades and "exp_inf" in state:
                sizes[p] = float(state["exp_inf"].square().sum())
    return sizes


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
