"""Converts the arguments that torch.distributed passes to a backend (nested lists of tensors, options, split sizes)
into arguments of DADT's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
Tensors = Sequence[torch.Tensor]


def first(args: Any) -> torch.Tensor:
    """Return the first tensor in arbitrarily nested lists. Empty lists are skipped, because scatter passes an empty
    list on ranks that contribute nothing. Raises ValueError if no tensor is found."""
    for each in args:
        if isinstance(each, torch.Tensor):
            return each
        if isinstance(each, list | tuple) and each:
            return first(each)
    raise ValueError("torch.distributed was given no tensor")


def listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def reduction_of(opts: Any) -> str:
    op = getattr(opts, "reduceOp", ReduceOp.SUM if opts is None else opts)
    for known, name in _REDUCTIONS.items():
        if op == known:
            return name
    usable = ", ".join(f"ReduceOp.{each.name}" for each in _REDUCTIONS)
    raise ValueError(f"backend dadt does not know {_told(op)}: use {usable}")


def _told(op: Any) -> str:
    """Return the name of a reduce operation as scripts write it, such as "ReduceOp.SUM"."""
    # ReduceOp objects have no name attribute, so the enum's members are compared; operations with parameters fall back
    # to str().
    names = (f"ReduceOp.{name}" for name, member in ReduceOp.RedOpType.__members__.items() if op == member)
    return next(names, str(op))


def parts(whole: torch.Tensor, part: torch.Tensor, size: int) -> Tensors:
    """Return one view of `whole`'s memory per rank, each shaped like `part`. Raises ValueError if sizes or dtypes do
    not match."""
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{size} ranks with {part.numel()} elements of {part.dtype} each need one tensor of"
            f" {size * part.numel()} for all, not one of {whole.numel()} of {whole.dtype}"
        )
    return [row.view(part.shape) for row in whole.view(size, -1)] if part.numel() else [part] * size


def rows(tensor: Any, splits: Sequence[int], size: int) -> Tensors:
    if not splits and tensor.shape[0] % size:
        raise ValueError(f"{tensor.shape[0]} rows cannot be split equally between {size} ranks; give split sizes")
    rows: Tensors = tensor.split(list(splits) or [tensor.shape[0] // size] * size)
    return rows
