"""Keras 3 on several ranks, on torch or TensorFlow: `import dadt.keras as dadt`, for scripts that handle ranks
themselves.

Scripts that do not handle ranks need no part of this module: see docs/keras.md.
"""

from __future__ import annotations

import keras  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.api.lifecycle import (
    add_process_set,
    cross_rank,
    cross_size,
    init,
    initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from dadt.api.state import allgather_object, broadcast_object
from dadt.errors import ConfigError
from dadt.frontends.keras import callbacks, hook
from dadt.frontends.keras.operations import allgather, allreduce, broadcast, broadcast_variables
from dadt.frontends.keras.optimizer import DistributedOptimizer

if keras.backend.backend() not in hook.BACKENDS:
    raise ConfigError(
        f"dadt.keras: Keras's backend is {keras.backend.backend()} here, and DADT trains it on torch and TensorFlow;"
        ' set os.environ["KERAS_BACKEND"] = "torch" before `import keras`'
    )

__all__ = [
    "DistributedOptimizer",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "init",
    "initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
