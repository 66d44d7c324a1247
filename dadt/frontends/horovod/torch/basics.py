"""Start and end, who is who, and what there is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from dadt import world as environment
from dadt.api import lifecycle
from dadt.config import Config
from dadt.frontends.horovod.common.exceptions import horovods
from dadt.frontends.horovod.torch import process_sets as sets
from dadt.frontends.horovod.torch.process_sets import ProcessSet

T = TypeVar("T")
_is_initialized = False


def init(comm: Iterable[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job. Gradients are averaged at once, as Horovod does, unless `--algorithm` was given.

    comm: all ranks, or None. process_sets: sets to add, the same on all ranks; or "dynamic", which is always the case.
    A second call does nothing. Raises ValueError for other ranks or for a duplicate set.
    """
    global _is_initialized
    if _is_initialized:
        return
    with horovods():
        if not lifecycle.initialized():
            # A process that no launcher has told anything, and --no-horovod, leave "none".
            algorithm = Config.from_env().horovod
            lifecycle.init(algorithm="sync" if algorithm == "none" else algorithm)
            _tell()
        if comm is not None and not isinstance(comm, Iterable):
            raise ValueError("hvd.init: communicators of mpi4py are not supported; leave comm out")
        if comm and sorted(comm) != list(range(lifecycle.size())):
            raise ValueError("hvd.init: comm must name all ranks; use process_sets for some of them")
        _is_initialized = True
        sets.begin([] if process_sets is None or isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Close the process sets. `init` may follow; the job itself is left when the process ends."""
    global _is_initialized
    if is_initialized():
        _is_initialized = False
        with horovods():
            sets.end()


def is_initialized() -> bool:
    """Return whether this process is between `init` and `shutdown`."""
    return _is_initialized and lifecycle.initialized()


# Who is who -----------------------------------------------------------------------------------------------------------


def _asked(function: Callable[[], T]) -> Callable[[], T]:
    def ask() -> T:
        if not is_initialized():
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return function()

    ask.__name__ = ask.__qualname__ = function.__name__
    ask.__doc__ = f"{(function.__doc__ or '').split('.')[0]}. Raises ValueError before `init`."
    return ask


rank = _asked(lifecycle.rank)
size = _asked(lifecycle.size)
local_rank = _asked(lifecycle.local_rank)
local_size = _asked(lifecycle.local_size)
cross_rank = _asked(lifecycle.cross_rank)
cross_size = _asked(lifecycle.cross_size)


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return lifecycle.session().is_homogeneous


# What there is --------------------------------------------------------------------------------------------------------


def mpi_threads_supported() -> bool:
    """Return whether MPI takes calls from several threads. Raises ValueError where MPI is not used."""
    if not mpi_enabled():
        raise ValueError("hvd.mpi_threads_supported: MPI is not enabled; use --executor mpi")
    return True


def mpi_enabled() -> bool:
    """Return whether tensors travel by MPI."""
    return lifecycle.initialized() and lifecycle.session().config.executor == "mpi"


def mpi_built() -> bool:
    """Return whether MPI is used: DADT loads it when `--executor mpi` asks for it, and is never built with one."""
    return mpi_enabled()


def gloo_enabled() -> bool:
    """Return whether ranks meet without MPI."""
    return not mpi_enabled()


def gloo_built() -> bool:
    """Return True: torch has Gloo."""
    return True


def nccl_built() -> int:
    """Return the version of NCCL as a number such as 22105, or 0 if torch has none."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Return False: DADT does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: DADT does not use Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Return whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise ValueError: DADT records a whole job, with `--timeline FILE`."""
    raise ValueError("hvd.start_timeline: the timeline covers a whole job here; give dadt run --timeline FILE")


def stop_timeline() -> None:
    """Raise ValueError, like `start_timeline`."""
    start_timeline("")


def _tell() -> None:
    """Say once whose Horovod this is, and set the variables that scripts read."""
    world, runtime = lifecycle.session().world, lifecycle.session().runtime
    if world.rank == 0 and getattr(sys.modules.get("horovod"), "__name__", "") == "dadt.frontends.horovod":
        how = lifecycle.session().config.algorithm
        runtime.say(f"horovod is not installed: DADT takes its place, with --algorithm {how}")
    place = {
        "RANK": world.rank,
        "SIZE": world.world_size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_SIZE": world.local_size,
        "CROSS_RANK": world.cross_rank,
        "CROSS_SIZE": lifecycle.session().cross_size,
    }
    environment.tell_horovod(place)
