"""How the ranks learn from each other in the simulator, written as one word: sync, plain, pipe, pipe:c=1.5."""

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
    """`sync`; `plain`, the delay alone; `pipe` as DADT does it for SGD and Adam; and changes of `pipe` by key=value."""

    name: str
    delayed: bool = True
    warmup: int = 50
    fall_back: int = 1
    """1: fall back to synchronous steps if gradients blow up; 0: never."""
    c: float | None = None
    """Predict by the last displacements in place of the optimizer's own step: the factor of the last one."""
    c2: float = 0.0
    """The factor of the displacement before the last one."""
    ramp: int = 0
    """Delayed steps over which the factors grow from 0."""
    rise: int = 0
    """Delayed steps over which the size of the steps rises from 0 again."""
    own: float | None = None
    """Predict by the optimizer's own step, as if this share of the rank's own gradient in flight, and else the last
    average that has arrived, were what it will be given. None: DADT's share."""
    back: float | None = None
    """The share of the last known gap between the rank's gradient and the average that is added to that. None:
    DADT's."""
    mix: float = 0.0
    """Apply (1 + mix) updates less mix times the update before: error feedback for delayed updates."""

    @classmethod
    def parse(cls, text: str) -> Method:
        """The method of this text. Raises ValueError if it is none."""
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
        """The weight of a rank's own gradient in its prediction; None if the last displacements predict."""
        if self.c is not None:
            return None
        return share_of(ranks) if self.own is None else self.own

    def damping(self, share: float) -> float:
        return DAMPING * share if self.back is None else self.back

    def factors(self, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        return auto_factors(optimizer) if self.c is None else (self.c, self.c2)


def own_step(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where SGD or Adam would put the weights with these gradients; it and the weights stay as they are."""
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
    # By numpy: torch's own root may be off by a bit.
    root = torch.from_numpy(np.sqrt(square.numpy())) * (1 / math.sqrt(1 - beta2 ** (taken + 1))) + group["eps"]
    return (state["exp_avg"] * (-size * beta1) + gradient * (-size * (1 - beta1))) / root + w
