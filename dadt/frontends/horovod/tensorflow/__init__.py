"""Horovod's API for TensorFlow 2: `import dadt.frontends.horovod.tensorflow as hvd`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.frontends.horovod import keras as _keras
from dadt.frontends.horovod.torch import Average, Compression, Max, Min, Product, Sum
from dadt.frontends.horovod.torch.state import allgather_object as allgather_object
from dadt.frontends.horovod.torch.state import broadcast_object as broadcast_object
from dadt.frontends.keras.operations import broadcast_variables as broadcast_variables
from dadt.frontends.tensorflow import operations, tape


def __getattr__(name: str) -> Any:
    """Return the object of this name in Horovod's API for Keras, as this module defines only what differs from it."""
    return getattr(_keras, name)


_REDUCTIONS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Any:
    """Return the reduction of the tensor over all ranks, which is the mean unless `op` or `average` chooses another.
    Works in tf.function, too.

    Raises ValueError for compression (use `--compression`) and Adasum.
    """
    op = (Sum if average is False else Average) if op is None else op
    if compression is not Compression.none or op not in _REDUCTIONS:
        raise ValueError("hvd.allreduce: compression and Adasum are not supported with TensorFlow; use --compression")
    value = tf.convert_to_tensor(tensor)
    value = value if prescale_factor == 1.0 else value * tf.cast(prescale_factor, value.dtype)
    reduced = operations.allreduce(value, _REDUCTIONS[op], name=name)
    return reduced if postscale_factor == 1.0 else reduced * tf.cast(postscale_factor, reduced.dtype)


def grouped_allreduce(tensors: Iterable[Any], **options: Any) -> list[Any]:
    """Return the tensors, each reduced over all ranks. options: the keyword arguments of `allreduce`."""
    return [allreduce(each, **options) for each in tensors]


def allgather(tensor: Any, name: str | None = None) -> Any:
    """Return the tensors of all ranks, joined along their first dimension."""
    return operations.allgather(tensor, name=name)


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root rank's tensor on all ranks."""
    return operations.broadcast(tensor, root_rank, name=name)


def DistributedGradientTape(gradtape: Any, op: Any = Average, **others: Any) -> Any:
    """Wrap a tape, so that its gradients are averaged over all ranks. sparse_as_dense and the devices have no effect;
    other arguments raise ValueError if they ask for something that DADT does not support."""
    _keras.refuse("DistributedGradientTape", op=op, **others)
    return tape.DistributedGradientTape(gradtape, reduction="sum" if op == Sum else "mean")
