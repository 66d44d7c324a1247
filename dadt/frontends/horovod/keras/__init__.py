"""Horovod's API for Keras 3, on torch or TensorFlow: `import dadt.frontends.horovod.keras as hvd`."""

from __future__ import annotations

from typing import Any

import keras  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.frontends.horovod.errors import horovods
from dadt.frontends.horovod.keras import callbacks as callbacks
from dadt.frontends.horovod.torch import Adasum as Adasum
from dadt.frontends.horovod.torch import Average as Average
from dadt.frontends.horovod.torch import Compression as Compression
from dadt.frontends.horovod.torch import Max as Max
from dadt.frontends.horovod.torch import Min as Min
from dadt.frontends.horovod.torch import ProcessSet as ProcessSet
from dadt.frontends.horovod.torch import Product as Product
from dadt.frontends.horovod.torch import Sum as Sum
from dadt.frontends.horovod.torch import add_process_set as add_process_set
from dadt.frontends.horovod.torch import ccl_built as ccl_built
from dadt.frontends.horovod.torch import cross_rank as cross_rank
from dadt.frontends.horovod.torch import cross_size as cross_size
from dadt.frontends.horovod.torch import cuda_built as cuda_built
from dadt.frontends.horovod.torch import ddl_built as ddl_built
from dadt.frontends.horovod.torch import global_process_set as global_process_set
from dadt.frontends.horovod.torch import gloo_built as gloo_built
from dadt.frontends.horovod.torch import gloo_enabled as gloo_enabled
from dadt.frontends.horovod.torch import gradients
from dadt.frontends.horovod.torch import init as init
from dadt.frontends.horovod.torch import is_homogeneous as is_homogeneous
from dadt.frontends.horovod.torch import is_initialized as is_initialized
from dadt.frontends.horovod.torch import local_rank as local_rank
from dadt.frontends.horovod.torch import local_size as local_size
from dadt.frontends.horovod.torch import mpi_built as mpi_built
from dadt.frontends.horovod.torch import mpi_enabled as mpi_enabled
from dadt.frontends.horovod.torch import mpi_threads_supported as mpi_threads_supported
from dadt.frontends.horovod.torch import nccl_built as nccl_built
from dadt.frontends.horovod.torch import rank as rank
from dadt.frontends.horovod.torch import remove_process_set as remove_process_set
from dadt.frontends.horovod.torch import rocm_built as rocm_built
from dadt.frontends.horovod.torch import shutdown as shutdown
from dadt.frontends.horovod.torch import size as size
from dadt.frontends.keras import optimizer as own
from dadt.frontends.keras.operations import of_backend, tensor_of


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
    **others: Any,
) -> Any:
    """Train with this optimizer on all ranks, and return the same object, where Horovod returns a copy.

    op: Average or Sum. name, devices, sparse_as_dense, num_groups and scale_local_gradients have no effect, because
    DADT groups gradients by `--bucket-mb`, and Keras's gradients are dense on torch. Raises ValueError for arguments
    that DADT does not support: compression (use `--compression`), gradient_predivide_factor, groups, process_set, and
    backward_passes_per_step (use Keras's gradient_accumulation_steps).
    """
    refuse(
        "DistributedOptimizer", compression=compression, gradient_predivide_factor=gradient_predivide_factor,
        groups=groups, process_set=process_set, op=op, **others,
    )  # fmt: skip
    with horovods():
        return own.DistributedOptimizer(optimizer, reduction="sum" if op == Sum else "mean")


def refuse(what: str, **given: Any) -> None:
    """Raise ValueError for arguments of Horovod's that DADT does not support with Keras and TensorFlow."""
    usual = {"compression": (Compression.none,), "process_set": (global_process_set, None), "op": (Average, Sum)}
    without_effect = ("device_dense", "device_sparse", "sparse_as_dense", "num_groups", "persistent", "name")
    hints = {"compression": "; use --compression", "backward_passes_per_step": "; use gradient_accumulation_steps"}
    for name, value in given.items():
        if name not in without_effect and value not in usual.get(name, (None, False, True, 1, 1.0, "")):
            raise ValueError(f"hvd.{what}: {name} is not supported with Keras and TensorFlow{hints.get(name, '')}")


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of the value over all ranks, which is the mean unless `op` or `average` chooses another."""
    reduced = gradients.allreduce(
        tensor_of(value), average=average, name=name, compression=compression, op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
    )  # fmt: skip
    return of_backend(reduced)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, joined along their first dimension."""
    return of_backend(gradients.allgather(tensor_of(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root rank's value on all ranks."""
    return of_backend(gradients.broadcast(tensor_of(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Return this rank's part of the value reduced over all ranks."""
    return of_backend(gradients.reducescatter(tensor_of(value), name=name, op=op))


def broadcast_global_variables(root_rank: int) -> None:
    """Raise ValueError, because Keras 3 has no global variables."""
    raise ValueError(
        "hvd.broadcast_global_variables: Keras 3 knows no global variables; give fit"
        f" hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank})"
    )


def load_model(
    filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = Compression.none
) -> Any:
    """Load a Keras model and wrap its optimizer, so that the optimizer trains on all ranks."""
    known = {each.__name__: each for each in custom_optimizers or ()}
    with horovods():
        return own.wrapped(keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})}))
