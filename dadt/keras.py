"""Keras 3 on several ranks, on torch or TensorFlow: `import dadt.keras as dadt`, for scripts that handle ranks
themselves.

Scripts that do not handle ranks need no part of this module: see docs/keras.md.
"""

from __future__ import annotations

import keras  # type: ignore[import-untyped,import-not-found,unused-ignore]

from dadt.api.lifecycle import add_process_set as add_process_set
from dadt.api.lifecycle import cross_rank as cross_rank
from dadt.api.lifecycle import cross_size as cross_size
from dadt.api.lifecycle import init as init
from dadt.api.lifecycle import initialized as initialized
from dadt.api.lifecycle import local_rank as local_rank
from dadt.api.lifecycle import local_size as local_size
from dadt.api.lifecycle import rank as rank
from dadt.api.lifecycle import remove_process_set as remove_process_set
from dadt.api.lifecycle import shutdown as shutdown
from dadt.api.lifecycle import size as size
from dadt.api.state import allgather_object as allgather_object
from dadt.api.state import broadcast_object as broadcast_object
from dadt.errors import ConfigError
from dadt.frontends.keras import callbacks as callbacks
from dadt.frontends.keras import hook
from dadt.frontends.keras.operations import allgather as allgather
from dadt.frontends.keras.operations import allreduce as allreduce
from dadt.frontends.keras.operations import broadcast as broadcast
from dadt.frontends.keras.operations import broadcast_variables as broadcast_variables
from dadt.frontends.keras.optimizer import DistributedOptimizer as DistributedOptimizer

if keras.backend.backend() not in hook.BACKENDS:
    raise ConfigError(
        f"dadt.keras: Keras's backend is {keras.backend.backend()} here, and DADT trains it on torch and TensorFlow;"
        ' set os.environ["KERAS_BACKEND"] = "torch" before `import keras`'
    )
