"""Puts averaged gradients into `.grad`, where the script and its optimizer use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dadt.comm.shards import PART, like


def ratio_of(now: torch.Tensor | None, sent: torch.Tensor | None) -> torch.Tensor | float | None:
    """Return the factor that converts gradients from the loss scale `sent` to the loss scale `now`; None if both are
    the same object."""
    return None if now is sent else (1.0 if now is None else now) / (1.0 if sent is None else sent)


def hand_out(
    parameters: Sequence[torch.Tensor],
    averages: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ratio: torch.Tensor | float | None,
    used: frozenset[int] = frozenset(),
    tables: Sequence[torch.Tensor] = (),
) -> None:
    """Set each parameter's `.grad` to its average times `ratio`, and to None for parameters without an average. used:
    ids of frozen parameters that were already frozen when their gradients were read. tables: parameters with sparse
    gradients."""
    absent = [p for p in tables if p.grad is None]
    # Skip parameters that were frozen during the exchange, because the script expects them to stay unchanged.
    given = [(p, gradient) for p, gradient in averages if p.requires_grad or id(p) in used]
    if ratio is not None and given:
        for device in {gradient.device for _, gradient in given}:
            here = ratio.to(device) if isinstance(ratio, torch.Tensor) else ratio
            torch._foreach_mul_([gradient for _, gradient in given if gradient.device == device], here)
    ids = {id(p) for p, _ in given}
    for p in parameters:
        if id(p) not in ids:
            p.grad = None
    for p, gradient in given:
        if p.grad is not None and p.grad.layout == torch.sparse_coo:
            p.grad = gradient.to_sparse(1)
        elif hasattr(p, PART):
            p.grad = like(p, gradient)
        else:
            p.grad = gradient
    for p in absent:
        # Averages of sparse gradients are made sparse too, because some optimizers reject dense gradients for such
        # parameters.
        if p.grad is not None and p.grad.layout == torch.strided:
            p.grad = p.grad.to_sparse(1)


def without_averages(now: Sequence[torch.Tensor], averaged: Sequence[torch.Tensor]) -> None:
    """Remove the gradients of parameters that were added or unfrozen after the exchange began. now: the parameters that
    are trained; averaged: the parameters of the exchange."""
    ids = {id(p) for p in averaged}
    for p in now:
        if id(p) not in ids:
            p.grad = None


def hand_out_zeros(parameters: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> None:
    """Set gradients to zeros in newly allocated memory. tables: parameters with sparse gradients."""
    ids = {id(p) for p in tables}
    # Only parameters with a gradient get zeros, because zeros in place of None would make the optimizer apply weight
    # decay and create state. If no parameter has a gradient, all get zeros.
    for p in [p for p in parameters if p.grad is not None] or parameters:
        zeros = torch.zeros_like(p)
        p.grad = zeros.to_sparse(1) if id(p) in ids else zeros
