"""Functions that give all ranks the same model, optimizer state and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dadt.api import state as own
from dadt.comm.collectives import object as objects
from dadt.frontends.horovod.errors import horovods
from dadt.frontends.horovod.torch.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite tensors with those of the root, in place.

    params: a module's state_dict(), or a list of its named_parameters() or parameters(), the same on all ranks. Raises
    ValueError for anything else.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        pairs = [each if isinstance(each, tuple) else (str(number), each) for number, each in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    with horovods():
        own.broadcast_parameters([(str(name), value) for name, value in pairs], root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Load the root's optimizer state and settings, such as learning rates, on all ranks.

    As in Horovod, missing gradients become zeros if the optimizer has no state yet; no step is taken for this. model:
    accepted for scripts written for Horovod, and not used. Raises ValueError for LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    with horovods():
        own.broadcast_optimizer_state(optimizer, root_rank)
    if not optimizer.state_dict()["state"]:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on all ranks. The object is pickled by cloudpickle."""
    with horovods():
        among = process_set.among
        root = among.number_of(root_rank, "root_rank")
        return objects.broadcast_object(among, obj, root, among.name(name and f"object.{name}"))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's object, by rank. Objects are pickled by cloudpickle."""
    with horovods():
        among = global_process_set.among
        return objects.allgather_object(among, obj, among.name(name and f"objects.{name}"))
