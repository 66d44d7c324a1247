"""The API of DADT's first version: `import dadt.pytorch as dadt`. New scripts use `import dadt`.

Its operations take a tensor and its name or number, in either order, and return sums. Those whose names end in `_async`
do not wait: they return the sum of the previous call with the same name, and zeros the first time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dadt.api import collectives, lifecycle, optimizer, sparse
from dadt.api.collectives import barrier, local_barrier
from dadt.api.lifecycle import cross_rank, cross_size, initialized, local_rank, local_size, rank, size
from dadt.api.state import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from dadt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from dadt.comm.collectives.process_set import Handle

__all__ = [
    "Config",
    "DistributedOptimizer",
    "all_reduce",
    "all_reduce_async",
    "barrier",
    "broad_cast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "coo_all_reduce",
    "coo_all_reduce_async",
    "cross_rank",
    "cross_size",
    "init",
    "initialize",
    "initialized",
    "local_barrier",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
T = TypeVar("T", bound=torch.optim.Optimizer)
_under_way: dict[str, Handle[Tensor]] = {}


class Config:
    """Settings for `initialize`. None means the default of `dadt.init`."""

    cycle_duration_ms: float | None = None
    executor_type: str | None = None
    broad_cast_executor: str | None = None
    all_reduce_executor: str | None = None
    all_reduce_buffer_size: int | None = None
    group_buffer_size: int | None = None
    timeline_path: str | None = None
    gpu_device_id: int = -1


def init(
    cycle_duration_ms: float | None = None,
    broad_cast_executor: str | None = None,
    all_reduce_executor: str | None = None,
    all_reduce_buffer_size: int | None = None,
    group_buffer_size: int | None = None,
    timeline_path: str | None = None,
    **knobs: Any,
) -> None:
    """Join the job as one of its ranks: the same function as `dadt.init`."""
    lifecycle.init(
        cycle_duration_ms=cycle_duration_ms,
        broadcast_executor=_lower(broad_cast_executor),
        all_reduce_executor=_lower(all_reduce_executor),
        all_reduce_buffer_size=all_reduce_buffer_size,
        group_buffer_size=group_buffer_size,
        timeline_path=timeline_path,
        **knobs,
    )


def initialize(
    cycle_duration_ms: float | Config | None = None,
    executor_type: str | None = None,
    all_reduce_buffer_size: int | None = None,
    gpu_device_id: int = -1,
    **knobs: Any,
) -> None:
    """Join the job as one of its ranks, as `dadt.init` does; settings are passed as arguments or in a Config.
    gpu_device_id: CUDA device to use; -1: the current one."""
    if isinstance(cycle_duration_ms, Config):
        given = cycle_duration_ms
        gpu_device_id, executor_type = given.gpu_device_id, given.executor_type
        cycle_duration_ms, all_reduce_buffer_size = given.cycle_duration_ms, given.all_reduce_buffer_size
        names = ("broad_cast_executor", "all_reduce_executor", "group_buffer_size", "timeline_path")
        knobs = {name: getattr(given, name) for name in names} | knobs
    if gpu_device_id >= 0:
        if not torch.cuda.is_available():
            raise ConfigError(f"gpu_device_id {gpu_device_id}: torch finds no CUDA device; leave it out")
        torch.cuda.set_device(gpu_device_id)
    init(cycle_duration_ms, all_reduce_buffer_size=all_reduce_buffer_size, executor=_lower(executor_type), **knobs)


def shutdown() -> None:
    """Wait for pending operations and leave the job: the same function as `dadt.shutdown`."""
    handles = list(_under_way.values())
    _under_way.clear()
    try:
        for handle in handles:
            handle.wait()
    finally:
        lifecycle.shutdown()


def broad_cast(x: Any, name: Any) -> Tensor:
    """Return rank 0's tensor on all ranks."""
    tensor, name = _ordered(x, name)
    return collectives.broadcast(tensor, name=f"broad_cast {name}")


def all_reduce(x: Any, name: Any, multiplier: float = 1.0) -> Tensor:
    """Return the sum of the tensors of all ranks, times the multiplier."""
    tensor, name = _ordered(x, name)
    return _times(collectives.all_reduce(tensor, "sum", name=f"all_reduce {name}"), multiplier)


def all_reduce_async(x: Any, name: Any, multiplier: float = 1.0) -> Tensor:
    """Start to sum the tensor over all ranks. Returns the sum from the previous call with this name, times the
    multiplier; zeros the first time."""
    tensor, name = _ordered(x, name)
    copy = tensor.detach().clone()  # a copy, since the caller may change the tensor before it is summed
    before = _previous(f"all_reduce_async {name}", lambda key: collectives.all_reduce_async(copy, "sum", name=key))
    return _times(before, multiplier) if before is not None else torch.zeros_like(tensor, requires_grad=False)


def coo_all_reduce(x: Any, name: Any) -> Tensor:
    """Return the sum of the sparse tensors of all ranks."""
    tensor, name = _ordered(x, name)
    return sparse.coo_all_reduce(tensor, "sum", name=f"coo_all_reduce {name}")


def coo_all_reduce_async(x: Any, name: Any) -> Tensor:
    """Start to sum the sparse tensors of all ranks. Returns the sum from the previous call with this name; zeros the
    first time."""
    tensor, name = _ordered(x, name)
    copy = tensor.detach().coalesce().clone()
    key = f"coo_all_reduce_async {name}"
    before = _previous(key, lambda key: sparse.coo_all_reduce_async(copy, "sum", name=key))
    return before if before is not None else torch.zeros_like(copy).coalesce()


def DistributedOptimizer(optimizer: T, avg: bool = True, is_avg: bool = True) -> T:
    """Train with this optimizer on all ranks, by `dadt.DistributedOptimizer`. avg, is_avg: average gradients if both
    are true, else sum them."""
    return _wrap(optimizer, reduction="mean" if avg and is_avg else "sum")


_wrap = optimizer.DistributedOptimizer


def _previous(key: str, start: Callable[[str], Handle[Tensor]]) -> Tensor | None:
    before = _under_way.pop(key, None)
    result: Tensor | None = before.wait() if before is not None else None
    _under_way[key] = start(key)
    return result


def _ordered(x: Any, name: Any) -> tuple[Tensor, Any]:
    return (name, x) if isinstance(name, torch.Tensor) else (x, name)


def _times(tensor: Tensor, multiplier: float) -> Tensor:
    return tensor if multiplier == 1.0 else tensor * multiplier


def _lower(name: str | None) -> str | None:
    return None if name is None else name.lower()
