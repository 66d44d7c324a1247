"""Horovod's `init` and `shutdown`, and its queries of what it was built with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from dadt import world as environment
from dadt.api import lifecycle
from dadt.config import Config
from dadt.frontends.horovod.errors import horovods
from dadt.frontends.horovod.torch import place
from dadt.frontends.horovod.torch import process_sets as sets
from dadt.frontends.horovod.torch.process_sets import ProcessSet
from dadt.inject import worker

_TOLD = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
"""Numbers of this rank that scripts also find in environment variables, such as HOROVOD_RANK."""

# By default each worker sees one GPU. Scripts for Horovod expect to see all GPUs of the host, and choose one by
# local_rank.
environment.see_all()
if worker.runtime is not None:  # some scripts read environment variables such as HOROVOD_RANK before they call `init`
    _world = worker.runtime.ranks.world
    environment.tell_horovod({"RANK": _world.rank, "SIZE": _world.world_size, "CROSS_RANK": _world.cross_rank})
    environment.tell_horovod({"LOCAL_RANK": _world.local_rank, "LOCAL_SIZE": _world.local_size})


def init(comm: Iterable[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job. Gradients are averaged at once, as in Horovod, unless `--algorithm` was given.

    comm: a list of all ranks, or None. process_sets: sets to add, the same on all ranks; or "dynamic", which has no
    effect, since sets can be added at any time. A second call does nothing. Random numbers are left to the script: if
    it sets no seed, ranks draw different ones. Raises ValueError for other ranks or for a duplicate set.
    """
    if place.is_initialized():
        return
    if comm is not None and not isinstance(comm, Iterable):
        raise ValueError("hvd.init: communicators of mpi4py are not supported; leave comm out")
    with horovods():
        if not lifecycle.initialized():
            algorithm = Config.from_env().horovod
            lifecycle.init(algorithm="sync" if algorithm == "none" else algorithm)
            worker.forget_seeds()
            _tell()
    numbers = place.begin()
    environment.tell_horovod({name.upper(): numbers[name] for name in _TOLD})
    if comm and sorted(comm) != list(range(place.size())):
        raise ValueError("hvd.init: comm must name all ranks; use process_sets for some of them")
    sets.begin([] if process_sets is None or isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Close the process sets. `init` may be called again; the process itself leaves the job when it ends."""
    if place.is_initialized() and lifecycle.initialized():
        with horovods():
            sets.end()
    place.end()


def _tell() -> None:
    """Report on rank 0 that DADT takes the place of Horovod, and choose the GPU whose number is this process's local
    rank, if there is such a GPU."""
    runtime, world = lifecycle.session().runtime, lifecycle.session().world
    if world.rank == 0 and getattr(sys.modules.get("horovod"), "__name__", "") == "dadt.frontends.horovod":
        how = lifecycle.session().config.algorithm
        runtime.ranks.say(f"horovod is not installed: DADT takes its place, with --algorithm {how}")
    if torch.cuda.is_available() and torch.cuda.device_count() > world.local_rank:
        torch.cuda.set_device(world.local_rank)


# Which libraries and features are available ---------------------------------------------------------------------------


def mpi_threads_supported() -> bool:
    """Return whether MPI takes calls from several threads. Raises ValueError where MPI is not used."""
    if not mpi_enabled():
        raise ValueError("hvd.mpi_threads_supported: MPI is not enabled; use --executor mpi")
    return True


def mpi_enabled() -> bool:
    """Return whether tensors are exchanged by MPI."""
    return lifecycle.initialized() and lifecycle.session().config.executor == "mpi"


def mpi_built() -> bool:
    """Return whether MPI is used. DADT is not built with an MPI library, but loads one for `--executor mpi`."""
    return mpi_enabled()


def gloo_enabled() -> bool:
    """Return whether ranks connect without MPI."""
    return not mpi_enabled()


def gloo_built() -> bool:
    """Return True, since torch contains Gloo."""
    return True


def nccl_built() -> int:
    """Return the version of NCCL as a number such as 22105, or 0 if torch has no NCCL."""
    if not torch.cuda.is_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Return False, because DADT does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False, because DADT does not use Intel's oneCCL."""
    return False


def cuda_built() -> bool:
    """Return whether torch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise ValueError, because DADT records a whole job, with `--timeline FILE`."""
    raise ValueError("hvd.start_timeline: the timeline covers a whole job here; give dadt run --timeline FILE")


def stop_timeline() -> None:
    """Raise ValueError, because DADT records a whole job, with `--timeline FILE`."""
    start_timeline("")
