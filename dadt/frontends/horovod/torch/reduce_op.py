"""The reductions of an allreduce, and factors by which tensors are multiplied."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ReduceOp(IntEnum):
    """How tensors are combined in a reduction. Averages are sums times 1 / size."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


REDUCTIONS = {
    ReduceOp.Average: "sum",
    ReduceOp.Sum: "sum",
    ReduceOp.Min: "min",
    ReduceOp.Max: "max",
    ReduceOp.Product: "product",
}
"""The reduction in DADT's core for each ReduceOp. The core sums the tensors for an average, and the sum is divided
afterwards."""


def chosen(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """Return the reduction chosen by `op`, or by Horovod's former argument `average`. Raises ValueError if both are
    given."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is not None:
        return ReduceOp(op)
    return ReduceOp.Sum if average is False else ReduceOp.Average


def factor_of(op: ReduceOp, postscale_factor: float, size: int) -> float:
    """Return the factor by which the sum or other reduction of DADT's core is multiplied. It includes 1 / size for an
    average."""
    return postscale_factor / size if op is ReduceOp.Average else postscale_factor


def scale_(tensor: Tensor, factor: float) -> Tensor:
    """Multiply the tensor in place. Integers are multiplied as float64 and truncated, half precision as float32."""
    if factor == 1.0:
        return tensor
    values = tensor.detach()
    if values.is_floating_point() or values.is_complex():
        values.mul_(factor)
    else:
        values.copy_(values.to(torch.float64).mul_(factor))
    return tensor


def scale_all_(tensors: Sequence[Tensor], factor: float) -> Sequence[Tensor]:
    """Multiply several tensors of one dtype in place. Integers are multiplied as float64 and truncated, half precision
    as float32."""
    values = [t.detach() for t in tensors]
    if factor != 1.0 and values[0].is_floating_point():
        torch._foreach_mul_(values, factor)
    else:
        for value in values:
            scale_(value, factor)
    return tensors


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor itself if the factor is 1, otherwise a copy multiplied by the factor."""
    return tensor if factor == 1.0 else scale_(tensor.detach().clone(), factor)
