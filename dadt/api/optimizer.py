"""`dadt.DistributedOptimizer`, for scripts that wrap their optimizers themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import torch

from dadt.api.lifecycle import session, size
from dadt.inject import worker

T = TypeVar("T", bound=torch.optim.Optimizer)
_sums: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def DistributedOptimizer(
    optimizer: T, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None, *, reduction: str = "mean"
) -> T:
    """Train with this optimizer on all ranks. Returns the same object, so its class, state_dict, schedulers, GradScaler
    and add_param_group work as before.

    Gradients are averaged by `--algorithm`: `pipe` averages them one step late, behind the computation, and predicts
    weights (after Pipe-SGD, arXiv 1811.03619); `sync` averages them at once. Before the first step all ranks take rank
    0's weights, buffers and optimizer state (`--no-broadcast` leaves them as they are). Clipping and gradient
    accumulation work as in one process. All ranks wrap the same optimizers in the same order.

    named_parameters: accepted for scripts written for Horovod, and not used; parameters are matched by their order.
    reduction: mean, or sum, which multiplies the averages by the number of ranks just before the step. With a closure,
    it multiplies gradients and loss at each evaluation.

    Raises TypeError if `optimizer` is not a torch.optim.Optimizer, ValueError for another reduction, and DadtError
    before `init`.
    """
    session()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer: give a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"DistributedOptimizer: reduction {reduction}: choose mean or sum")
    worker.wrap(optimizer)
    if reduction == "sum" and optimizer not in _sums:
        _sums.add(optimizer)
        optimizer.register_step_pre_hook(partial(_sum, size()))
    return optimizer


def _sum(ranks: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Step pre-hook that multiplies an optimizer's averaged gradients by the number of ranks. It runs after the
    averaging, since DADT averages in a hook for all optimizers, and torch runs such hooks first."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _multiply(optimizer, ranks)
        return None

    def summed() -> Any:
        loss = closure()
        _multiply(optimizer, ranks)
        return loss * ranks

    return ((args[0], summed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": summed})


def _multiply(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    with torch.no_grad():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.mul_(ranks)
