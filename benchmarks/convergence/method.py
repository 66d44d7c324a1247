"""Parses the names of the simulator's training methods: sync, plain, pipe, or with options as in pipe:c=1.5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from dadt.train.prediction.displacement import auto_factors
from dadt.train.prediction.expectation import DAMPING, share_of


@dataclass(frozen=True)
class Method:
    """One training method: `sync`; `plain`, which only delays gradients; `pipe` as DADT does it for SGD and Adam; and
    variants of `pipe` with options key=value."""

    name: str
    delayed: bool = True
    warmup: int = 50
    fall_back: int = 1
    """1: return to synchronous steps if gradients blow up; 0: never."""
    c: float | None = None
    """Factor of the last displacement, by which weights are predicted in place of the optimizer's own step."""
    c2: float = 0.0
    """Factor of the displacement before the last one."""
    ramp: int = 0
    """Number of delayed steps over which the factors grow from 0."""
    rise: int = 0
    """Number of delayed steps over which the size of steps grows from 0 again."""
    own: float | None = None
    """Share of the rank's own gradient in flight in the gradient that is expected for the optimizer's own step; the
    rest is the last average that has arrived. None: DADT's share."""
    back: float | None = None
    """Share of the last known gap between the rank's gradient and the average that is added to the expected gradient.
    None: DADT's share."""
    mix: float = 0.0
    """Factor by which the change between two updates is added to the newer one: error feedback for delayed updates."""

    @classmethod
    def parse(cls, text: str) -> Method:
        """Return the method with this name. Raises ValueError if there is none."""
        base, _, more = text.partition(":")
        if base not in ("sync", "plain", "pipe"):
            raise ValueError(f"{text}: begin with sync, plain or pipe")
        given: dict[str, float] = {"c": 0.0} if base == "plain" else {}
        known = {f.name for f in fields(cls)} - {"name", "delayed"}
        for part in filter(None, more.split(",")):
            key, _, value = part.partition("=")
            if key not in known:
                raise ValueError(f"{text}: {key} is unknown; there are {', '.join(sorted(known))}")
            given[key] = float(value) if key in ("c", "c2", "mix", "own", "back") else int(value)
        return cls(text, delayed=base != "sync", **given)  # type: ignore[arg-type]

    def share(self, ranks: int) -> float | None:
        """Return the weight of a rank's own gradient in its prediction; None if weights are predicted from
        displacements."""
        if self.c is not None:
            return None
        return share_of(ranks) if self.own is None else self.own

    def damping(self, share: float) -> float:
        return DAMPING * share if self.back is None else self.back

    def factors(self, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        return auto_factors(optimizer) if self.c is None else (self.c, self.c2)


def own_step(optimizers: Sequence[torch.optim.Optimizer], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the weights after a step of SGD or Adam with these gradients. Changes neither the optimizer nor the
    weights. optimizers: one, as a second one would give parameters another order than gradients have."""
    (optimizer,) = optimizers
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    ahead = []
    for (p, group), gradient in zip(parameters, gradients, strict=True):
        step = adam_step if "betas" in group else sgd_step
        ahead.append(step(p.detach(), gradient, group, optimizer.state[p]))
    return ahead


def sgd_step(w: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
    rate, momentum = group["lr"], group["momentum"]
    assert not (group["nesterov"] or group["dampening"] or group["weight_decay"] or group["maximize"])
    return state["momentum_buffer"] * (-rate * momentum) + gradient * -rate + w


def adam_step(w: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> torch.Tensor:
    rate, (beta1, beta2), taken = group["lr"], group["betas"], float(state["step"])
    assert not (group["amsgrad"] or group["maximize"])
    size = rate / (1 - beta1 ** (taken + 1))
    decay = group["weight_decay"]
    if group["decoupled_weight_decay"]:
        w = w * (1 - rate * decay)
    elif decay:
        gradient = gradient + w * decay
    square = state["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2)
    # The root is computed by NumPy, since torch's own root may be off by one bit.
    root = torch.from_numpy(np.sqrt(square.numpy())) * (1 / math.sqrt(1 - beta2 ** (taken + 1))) + group["eps"]
    return (state["exp_avg"] * (-size * beta1) + gradient * (-size * (1 - beta1))) / root + w
