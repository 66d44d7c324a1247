"""Operations between ranks on Keras's tensors, on arrays and on the variables of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import keras  # type: ignore[import-untyped,import-not-found,unused-ignore]
import torch

from dadt.api import collectives, state
from dadt.frontends.tensorflow.memory import to_numpy, to_torch

if TYPE_CHECKING:
    from dadt.comm.collectives.process_set import ProcessSet


def tensor_of(value: Any) -> torch.Tensor:
    """Return a tensor, variable, array or number as a torch tensor, without gradients."""
    inner = getattr(value, "value", value)
    return inner.detach() if isinstance(inner, torch.Tensor) else to_torch(value)


def of_backend(tensor: torch.Tensor) -> Any:
    """Return a torch tensor as a tensor of Keras's backend."""
    return tensor if keras.backend.backend() == "torch" else keras.ops.convert_to_tensor(to_numpy(tensor))


def allreduce(
    value: Any, reduction: str = "mean", *, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the mean of the value over all ranks, or another reduction of it (sum, min, max or product)."""
    return of_backend(collectives.all_reduce(tensor_of(value), reduction, name=name, process_set=process_set))


def allgather(value: Any, *, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """Return the values of all ranks, joined along their first dimension, which may differ in size."""
    return of_backend(torch.cat(collectives.all_gather(tensor_of(value), name=name, process_set=process_set)))


def broadcast(value: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet | None = None) -> Any:
    """Return the root rank's value on all ranks."""
    return of_backend(collectives.broadcast(tensor_of(value), root_rank, name=name, process_set=process_set))


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Set these variables to the root's values on all ranks. Raises Mismatch if their shapes differ between ranks. Call
    it outside of tf.function."""
    every = list(variables)
    with torch.no_grad():
        tensors = {f"variable {i}, {getattr(v, 'path', v.name)}": tensor_of(v) for i, v in enumerate(every)}
        state.broadcast_parameters(tensors, root_rank)
        for variable, tensor in zip(every, tensors.values(), strict=True):
            if not isinstance(variable.value, torch.Tensor):
                variable.assign(to_numpy(tensor))
