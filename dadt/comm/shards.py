"""Finds the part of a tensor that this rank stores: a shard if the script shards the tensor over several ranks (torch's
DTensor), otherwise all of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter
from typing import Any, cast

import torch

_gradient = attrgetter("grad")
PART = "_local_tensor"
"""Name of the attribute in which a sharded tensor stores this rank's part."""


def is_sharded(tensor: torch.Tensor | None) -> bool:
    # Looks for a method instead of the class DTensor, whose module is slow to import.
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the tensor, not a copy. Unlike a parameter's `to_local`, this returns the same object
    at each call."""
    return cast(torch.Tensor, getattr(tensor, PART, tensor))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, for which all ranks that store parts of it must make the same call."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the parameter's gradient; None without a gradient."""
    return None if parameter.grad is None else local(parameter.grad)


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return this rank's part of each parameter's gradient; None for a parameter without one."""
    every = list(map(_gradient, parameters))
    # `map` avoids a Python call for each gradient, since this runs several times in a step.
    sharded = any(map(hasattr, every, repeat("to_local")))
    return [None if g is None else local(g) for g in every] if sharded else every


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like the parameter. part: this rank's part, whose memory the result uses."""
    if not is_sharded(parameter):
        return part
    sharded = cast(Any, parameter)
    given = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    made: torch.Tensor = type(sharded.data).from_local(part, sharded.device_mesh, sharded.placements, **given)
    return made


def place(tensor: torch.Tensor) -> str:
    """Return a text that describes which part of the tensor this rank stores; equal on ranks with equally divided
    tensors. Empty if it is not sharded."""
    if not is_sharded(tensor):
        return ""
    sharded = cast(Any, tensor)
    return f"{tuple(local(tensor).shape)} by {sharded.placements} of {tuple(sharded.device_mesh.shape)}"


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are stored. FSDP frees the memory of gathered weights, but keeps the tensors,
    and reading from those would crash the process."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.storage_offset() + last + 1
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


def gather_anew(modules: Iterable[Any]) -> None:
    """Make FSDP gather the weights of these modules again when it next needs them, since this rank's parts are about to
    change. FSDP keeps gathered weights after a forward that no backward follows. All ranks of an island must make the
    same calls."""
    for module in modules:
        names = {base.__name__ for base in type(module).__mro__}
        if "FSDPModule" in names:
            module.reshard()
        elif "FullyShardedDataParallel" in names and module._is_root is not None:
            handle = module._handle
            if handle is not None and handle.uses_sharded_strategy:
                handle.reshard(free_unsharded_flat_param=True)
