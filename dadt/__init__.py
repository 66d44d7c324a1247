"""Asynchronous data-parallel training for unmodified PyTorch scripts."""

import sys
from importlib import import_module
from typing import Any

from dadt import inject
from dadt.config import Config
from dadt.config.version import VERSION as __version__
from dadt.world import World

# Names of the API are imported on first use, so that `import dadt` alone does not import torch. Type checkers read
# __init__.pyi.
_HOMES = {
    "dadt.api.lifecycle": (
        "init initialized shutdown rank size local_rank local_size cross_rank cross_size add_process_set"
        " remove_process_set"
    ),
    "dadt.api.collectives": (
        "all_reduce all_reduce_async all_reduce_ all_reduce_async_ grouped_all_reduce"
        " grouped_all_reduce_async grouped_all_reduce_ join broadcast broadcast_async broadcast_"
        " broadcast_async_ reduce reduce_async gather gather_async scatter scatter_async all_gather"
        " all_gather_async all_to_all all_to_all_async reduce_scatter reduce_scatter_async barrier"
        " local_barrier synchronize poll"
    ),
    "dadt.api.messages": "send isend recv irecv",
    "dadt.api.sparse": "coo_all_reduce coo_all_reduce_async",
    "dadt.api.state": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "dadt.api.optimizer": "DistributedOptimizer",
    "dadt.api.sampler": "DistributedSampler",
    "dadt.comm.collectives.process_set": "Handle ProcessSet",
    "dadt.api.run": "run",
    "dadt.errors": (
        "Aborted CommError CommTimeout ConfigError DadtError LaunchError Mismatch NotResumed PeerLost Sharded"
        " StartTimeout Unproved WeightsDiffer"
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = ["Config", "World", "__version__", *_HOME]

_torch = sys.modules.get("torch")
# torch imports this package at the end of its own import, in every process of this Python. If torch is not being
# imported, the program itself has asked for DADT.
inject.asked_for = _torch is None or not getattr(_torch.__spec__, "_initializing", False)
if _torch is not None and inject.asked_for:
    inject.hook()
del _torch


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
