"""TensorFlow 2 on several ranks: `import dadt.tensorflow as dadt`, for scripts that handle ranks themselves.

Scripts that call `keras.Model.fit` and do not handle ranks need no part of this module: see docs/keras.md.
"""

from __future__ import annotations

from dadt.api.lifecycle import (
    cross_rank,
    cross_size,
    init,
    initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from dadt.api.state import allgather_object, broadcast_object
from dadt.frontends.keras.operations import broadcast_variables
from dadt.frontends.keras.optimizer import DistributedOptimizer
from dadt.frontends.tensorflow.operations import allgather, allreduce, broadcast
from dadt.frontends.tensorflow.tape import DistributedGradientTape

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "init",
    "initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
