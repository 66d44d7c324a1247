"""Keeps Adam's second moment v at least the square of its momentum, so that no weight moves further than the learning
rate, though neither v nor the momentum is computed from the gradients that the optimizer sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dadt import _core
from dadt.train.moment import Moment, beside
from dadt.train.prediction.rows import grouped, in_core


def confine(
    moment: Moment,
    parameters: list[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    gradients: list[torch.Tensor],
    skips: torch.Tensor | None,
) -> None:
    """Change v so that it is max(v, m^2) after Adam's coming step, of which these are the parameters, their state and
    their gradients. skips: more than 0 if the optimizer will leave the step out, which a GradScaler may tell it."""
    if moment.decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=moment.sign * moment.decay))
    if moment.sign < 0:
        gradients = list(torch._foreach_neg(gradients))
    squares = [state["exp_avg_sq"] for state in states]
    momenta = [state[moment.first] for state in states]
    # Adam divides v by rest = 1 - beta2^t, which grows with each step. So v is multiplied by the growth, which leaves
    # the quotient unchanged.
    rows: dict[float, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
    for v, m, g, state in zip(squares, momenta, gradients, states, strict=True):
        steps = state["step"]
        if skips is None and steps.device.type == "cpu" and in_core(row := (v, m, g)):
            rows.setdefault(float(steps), []).append(row)
            continue
        rest = 1 - moment.beta2 ** (steps.double() + 1)
        growth = beside(rest / (1 - moment.beta2 ** steps.double()), v)
        least = torch.lerp(m, g, moment.new).square_().mul_(beside(rest, v))
        kept = torch.maximum(v * growth, least).addcmul_(g, g, value=moment.beta2 - 1).div_(moment.beta2)
        v.copy_(kept if skips is None else torch.where(skips.to(v.device) > 0, v, kept))
    for steps, some in rows.items():
        rest = 1 - moment.beta2 ** (steps + 1)
        step = _core.MomentStep(
            fresh=moment.new, beta2=moment.beta2, rest=rest, growth=rest / (1 - moment.beta2**steps)
        )
        for dtype, counts, (second, first, fresh) in grouped(some)[0]:
            _core.confine(dtype, counts, second, first, fresh, step)
