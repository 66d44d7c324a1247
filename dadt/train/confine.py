"""Keeps Adam's second moment v at least the square of its momentum, and what Adamax divides by at least the momentum's
size, so that no weight moves further than the learning rate, though neither these nor the momentum are computed from
the gradients that the optimizer sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dadt import _core
from dadt.train.moment import Moment, beside
from dadt.train.prediction.rows import grouped

Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Second moment v, momentum and gradient of a parameter."""


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
    rows: dict[float, list[Row]] = {}
    for state, gradient in zip(states, gradients, strict=True):
        row, steps = (state["exp_avg_sq"], state[moment.first], gradient), state["step"]
        if steps.device.type == "cpu":
            rows.setdefault(float(steps), []).append(row)
        else:
            _confine(moment, row, *_factors(moment, steps.double()), skips)  # unread, as the host would have to wait
    for count, some in rows.items():
        rest, growth = _factors(moment, count)
        groups, others = grouped(some) if skips is None else ([], some)
        step = _core.MomentStep(fresh=moment.new, beta2=moment.beta2, rest=rest, growth=growth)
        for dtype, counts, (second, first, fresh) in groups:
            _core.confine(dtype, counts, second, first, fresh, step)
        for row in others:
            _confine(moment, row, rest, growth, skips)


def _factors(moment: Moment, steps: Any) -> tuple[Any, Any]:
    """Return 1 - beta2^t of the coming step t, and the factor by which it has grown. Adam divides v by it, so v is
    multiplied by the growth, which leaves the quotient unchanged; before the first step v is 0. steps: t - 1, as a
    number or a tensor."""
    rest, before = 1 - moment.beta2 ** (steps + 1), 1 - moment.beta2**steps
    if isinstance(steps, torch.Tensor):
        return rest, torch.where(steps > 0, rest / before, 1.0)
    return rest, rest / before if steps else 1.0


def _confine(moment: Moment, row: Row, rest: Any, growth: Any, skips: torch.Tensor | None) -> None:
    """Do for one parameter, on any device and in any memory order, what the C++ core does in one pass over memory."""
    v, m, g = row
    least = torch.lerp(m, g, moment.new).square_().mul_(beside(rest, v))
    kept = torch.maximum(v * beside(growth, v), least).addcmul_(g, g, value=moment.beta2 - 1).div_(moment.beta2)
    v.copy_(kept if skips is None else torch.where(skips.to(v.device) > 0, v, kept))


def confine_largest(moment: Moment, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Make the divisor r of Adamax max(beta2 r, |m|) in its coming step of this parameter, in place of
    max(beta2 r, |g|): the gradient g leads to a momentum that was told in few bits, and may be far larger than any true
    gradient. So `.grad` is limited to r, and the momentum before the step makes up for the rest: the one after it is
    that of g."""
    m, divisor, gradient = state[moment.first], state["exp_inf"], parameter.grad
    assert gradient is not None
    told = moment.sign * gradient
    if moment.decay:
        told += moment.decay * parameter
    after = torch.lerp(m, told.to(m.dtype), moment.new)
    torch.maximum(divisor.mul_(moment.fades), after.abs(), out=divisor)
    limited = told.clamp(-divisor, divisor)
    m.copy_(after.sub_(limited, alpha=moment.new).div_(moment.old))
    divisor.div_(moment.fades)
    if moment.decay:
        limited -= moment.decay * parameter
    gradient.copy_(moment.sign * limited)
