"""What of a tensor lies on this rank: of one that the script shards over several ranks (torch's DTensor) a part, of any
other one all of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter
from typing import Any, cast

import torch

_gradient = attrgetter("grad")
PART = "_local_tensor"
"""Attribute of a sharded tensor: what of it lies on this rank."""


def is_sharded(tensor: torch.Tensor | None) -> bool:
    # Not by its class, whose module is slow to import.
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part that lies on this rank, in the memory of the tensor itself: the same object at each call, which
    `to_local` of a parameter does not return."""
    return cast(torch.Tensor, getattr(tensor, PART, tensor))


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the part of the parameter's gradient that lies on this rank; None without a gradient."""
    return None if parameter.grad is None else local(parameter.grad)


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return `gradient` of each parameter."""
    every = list(map(_gradient, parameters))
    # Without a call for each, as this runs several times in a step.
    sharded = any(map(hasattr, every, repeat("to_local")))
    return [None if g is None else local(g) for g in every] if sharded else every


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded as the parameter is. part: what of it lies on this rank, whose memory it uses."""
    if not is_sharded(parameter):
        return part
    sharded = cast(Any, parameter)
    given = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    made: torch.Tensor = type(sharded.data).from_local(part, sharded.device_mesh, sharded.placements, **given)
    return made


def place(tensor: torch.Tensor) -> str:
    """Return which part of the tensor lies on this rank, as text that equal parts have in common."""
    if not is_sharded(tensor):
        return ""
    sharded = cast(Any, tensor)
    return f"{tuple(local(tensor).shape)} by {sharded.placements} of {tuple(sharded.device_mesh.shape)}"


def gather_anew(modules: Iterable[Any]) -> None:
    """Let FSDP gather the weights of these modules again when it next needs them, as those on this rank change. It
    keeps some from a forward that no backward follows. All ranks of an island have to call this alike."""
    for module in modules:
        names = {base.__name__ for base in type(module).__mro__}
        if "FSDPModule" in names:
            module.reshard()
        elif "FullyShardedDataParallel" in names and module._is_root is not None:
            handle = module._handle
            if handle is not None and handle.uses_sharded_strategy:
                handle.reshard(free_unsharded_flat_param=True)
