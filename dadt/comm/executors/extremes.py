"""Min and max reductions in which NaN wins. Gloo and MPI may drop a NaN, so ranks reduce the positions of NaN
separately."""

from __future__ import annotations

import math

import torch

from dadt.comm.executors.base import Executor


def allreduce(executor: Executor, flat: torch.Tensor, reduction: str) -> None:
    """Reduce the tensor in place over all ranks, by any reduction. For min and max of floats, an element that is NaN on
    any rank becomes NaN."""
    if reduction not in ("min", "max") or not flat.is_floating_point():
        executor.allreduce(flat, reduction)
        return
    missing = flat.isnan()
    executor.allreduce(flat, reduction)
    found = missing.any().to(torch.uint8).reshape(1)
    executor.allreduce(found, "max")
    if found:
        everywhere = missing.to(torch.uint8)
        executor.allreduce(everywhere, "max")
        flat[everywhere.bool()] = math.nan
