"""Adasum (arXiv 2006.02924), a way to combine gradients: parts with different directions are added up, and parts with
the same direction are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dadt.comm.collectives import operation
from dadt.comm.collectives.operation import Operation

if TYPE_CHECKING:
    from torch import Tensor

    from dadt.comm.collectives.process_set import ProcessSet


def prepare(tensor: Tensor, among: ProcessSet) -> tuple[Operation, Callable[[Any], Tensor]]:
    """Return an operation that gathers the tensors of all ranks, and the function that combines them.

    Ranks are combined in pairs, then pairs of pairs, in the same order on all ranks. Raises NotImplementedError unless
    the number of ranks is a power of two, and TypeError for integers.
    """
    if among.size & (among.size - 1):
        raise NotImplementedError(f"Adasum: {among.size} ranks; their number must be a power of two")
    if not tensor.is_floating_point():
        raise TypeError(f"Adasum: {tensor.dtype} has no directions; give floating-point numbers")
    call = operation.all_gather(tensor.detach().reshape(1, -1), among.size)
    call.signature = f"adasum {list(tensor.shape)} {tensor.dtype}"
    return call, lambda received: combined(received).to(tensor.dtype).view(tensor.shape)


def combined(gradients: list[Tensor]) -> Tensor:
    """Return the Adasum of gradients, whose number is a power of two. The result is computed in float64, or in float32
    for half precision."""
    wide = torch.float64 if gradients[0].element_size() > 2 else torch.float32
    level = [each.to(wide) for each in gradients]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _pair(a: Tensor, b: Tensor) -> Tensor:
    """Return the Adasum of two tensors, which is their sum if one of them is zero."""
    dot, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return a * (1 - _ratio(dot, of_a)) + b * (1 - _ratio(dot, of_b))


def _ratio(dot: Tensor, square: Tensor) -> Tensor:
    return torch.where(square > 0, dot / (2 * square).clamp_min(torch.finfo(square.dtype).tiny), torch.zeros_like(dot))
