"""TensorFlow 2 on several ranks: `import dadt.tensorflow as dadt`, for scripts that handle ranks themselves.

Scripts that call `keras.Model.fit` and do not handle ranks need no part of this module: see docs/keras.md.
"""

from __future__ import annotations

from dadt.api.lifecycle import cross_rank as cross_rank
from dadt.api.lifecycle import cross_size as cross_size
from dadt.api.lifecycle import init as init
from dadt.api.lifecycle import initialized as initialized
from dadt.api.lifecycle import local_rank as local_rank
from dadt.api.lifecycle import local_size as local_size
from dadt.api.lifecycle import rank as rank
from dadt.api.lifecycle import shutdown as shutdown
from dadt.api.lifecycle import size as size
from dadt.api.state import allgather_object as allgather_object
from dadt.api.state import broadcast_object as broadcast_object
from dadt.frontends.keras.operations import broadcast_variables as broadcast_variables
from dadt.frontends.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from dadt.frontends.tensorflow.operations import allgather as allgather
from dadt.frontends.tensorflow.operations import allreduce as allreduce
from dadt.frontends.tensorflow.operations import broadcast as broadcast
from dadt.frontends.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
