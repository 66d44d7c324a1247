"""Computes the weights after the next step of SGD or Adam from the optimizer's state and an expected gradient."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from dadt.comm.shards import PART

Factors = dict[str, float]
"""Factors of the formula for one optimizer step, by their names in _core.NextStep."""


class ParameterStep(NamedTuple):
    """One parameter with the gradient and optimizer state from which its next step is computed."""

    parameter: torch.Tensor
    expected: torch.Tensor
    """The gradient that the step is expected to use."""
    momentum: torch.Tensor | None
    square: torch.Tensor | None
    """The optimizer's second moment of the gradients; `momentum` is the first. None if the optimizer has none."""

    def ahead(self, factors: Factors) -> torch.Tensor:
        """Return the parameter's weights after the optimizer's next step, on any device, in any dtype and memory order.
        The C++ core computes the same result faster for contiguous tensors on the CPU."""
        w, g, m, v = (None if t is None else _real(t.detach()) for t in self)
        assert w is not None and g is not None
        if factors["decay"]:
            g = g + w * factors["decay"]
        move = g * factors["gradient"]
        if m is not None:
            move = m * factors["momentum"] + move
        if v is not None:
            root = (v * factors["square"] + g * g * factors["squared"]).sqrt()
            move = move / (root * factors["root"] + factors["epsilon"])
        ahead = move + w * factors["keep"]
        return torch.view_as_complex(ahead) if self.parameter.is_complex() else ahead


class Counts(NamedTuple):
    """Step counts stored on a GPU, with the numbers from which a kernel computes each step's factors. The factors in
    the Group are in this case those after infinitely many steps."""

    steps: list[torch.Tensor]
    log_beta1: float
    log_beta2: float
    """log2 of Adam's second beta; -inf for a beta of 0."""
    factors: Callable[[float], Factors]
    """Function that returns the factors after a number of steps."""


class Group(NamedTuple):
    """Parameters whose next steps have the same factors."""

    factors: Factors
    steps: list[ParameterStep]
    counts: Counts | None = None


def known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's next step can be computed. It can for torch's SGD, Adam and AdamW, and for classes that
    inherit their `step`.

    It cannot with `amsgrad`, whose step depends on the largest second moment so far.
    """
    steps: list[Callable[..., Any]] = [torch.optim.SGD.step, torch.optim.Adam.step, torch.optim.AdamW.step]
    own: Callable[..., Any] = type(optimizer).step
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return False
    return inspect.unwrap(own) in [inspect.unwrap(step) for step in steps]


def next_steps(
    optimizer: torch.optim.Optimizer, expected: dict[int, torch.Tensor], *, counted: bool = False
) -> Iterator[Group]:
    """Yield the parameters' next steps, grouped by factors. expected: the gradient of each parameter, by the
    parameter's id. Each yielded parameter is removed from it; a parameter that Adam has not updated yet stays in it.

    counted: whether to leave step counts that are stored on a GPU unread, since the host would have to wait.
    """
    for group in optimizer.param_groups:
        steps: dict[float, list[ParameterStep]] = {}
        counts: list[torch.Tensor] = []
        adam = "betas" in group
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            part = getattr(p, PART, p)
            if id(part) not in expected or (adam and "exp_avg" not in state):
                continue
            gradient = expected.pop(id(part))
            if adam:
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean, square = getattr(mean, PART, mean), getattr(square, PART, square)
                step = ParameterStep(part, gradient, mean, square)
                taken = state["step"]
                counts_there = isinstance(taken, torch.Tensor) and taken.is_cuda and taken.dtype is torch.float32
                if counted and counts_there:
                    at = math.inf
                    counts.append(taken)
                else:
                    at = _taken(taken, steps)
            else:
                momentum = state.get("momentum_buffer")
                momentum = getattr(momentum, PART, momentum)
                step, at = ParameterStep(part, gradient, momentum, None), float(momentum is not None)
            steps.setdefault(at, []).append(step)
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        for at, some in steps.items():
            if not adam:
                yield Group(_sgd(group, begun=at > 0), some)
                continue
            factors = partial(_adam, group, decoupled=decoupled)
            log1, log2 = (math.log2(beta) if beta else -math.inf for beta in map(float, group["betas"]))
            yield Group(factors(at), some, Counts(counts, log1, log2, factors) if at == math.inf else None)


def _taken(step: torch.Tensor | float, steps: Mapping[float, Any]) -> float:
    """Return the number of steps taken. A count on a GPU is read once per group, as the host waits for each read."""
    if isinstance(step, torch.Tensor) and step.device.type != "cpu" and steps:
        return min(steps)
    return float(step)


def _sgd(group: dict[str, Any], *, begun: bool) -> Factors:
    """Return the factors of SGD's next step. begun: whether the momentum buffer exists; if not, the next gradient
    becomes the momentum."""
    rate, momentum = float(group["lr"]), float(group["momentum"])
    new = 1 - group["dampening"] if begun else 1.0
    by_momentum, by_gradient = (momentum * momentum, 1 + momentum * new) if group["nesterov"] else (momentum, new)
    sign = -1.0 if group["maximize"] else 1.0  # `maximize` flips the gradient, but not the weight decay
    return _factors(
        momentum=-rate * by_momentum, gradient=-rate * by_gradient * sign, decay=group["weight_decay"] * sign
    )


def _adam(group: dict[str, Any], taken: float, *, decoupled: bool) -> Factors:
    rate, beta1, beta2 = float(group["lr"]), *map(float, group["betas"])
    size = rate / (1 - beta1 ** (taken + 1))
    decay, sign = float(group["weight_decay"]), -1.0 if group["maximize"] else 1.0
    return _factors(
        momentum=-size * beta1,
        gradient=-size * (1 - beta1) * sign,
        decay=0.0 if decoupled else decay * sign,
        keep=1 - rate * decay if decoupled else 1.0,
        square=beta2,
        squared=1 - beta2,
        root=1 / math.sqrt(1 - beta2 ** (taken + 1)),
        epsilon=float(group["eps"]),
    )


def _factors(
    *,
    momentum: float,
    gradient: float,
    decay: float,
    keep: float = 1.0,
    square: float = 0.0,
    squared: float = 0.0,
    root: float = 0.0,
    epsilon: float = 0.0,
) -> Factors:
    return dict(locals())


def _real(t: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers, on which Adam computes."""
    return torch.view_as_real(t) if t.is_complex() else t
