"""Chooses a job's executors: checks whether the executors that the user has given work on the job's hosts, and replaces
`auto` by one that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dadt.config import Config
from dadt.config.check import flag
from dadt.config.link import pace_of
from dadt.errors import ConfigError

_FLAGS = ("executor", "broadcast_executor", "allreduce_executor")


@dataclass(frozen=True, slots=True)
class HostWorkers:
    """One host of a job, with its number of workers and GPUs."""

    name: str
    """Name of the host for error texts; empty if all workers run on this host."""
    workers: int
    gpus: int
    """NVIDIA GPUs that the workers may use; 0 if torch has no CUDA."""


def choose(config: Config, places: Sequence[HostWorkers]) -> tuple[Config, str]:
    """Replace the executor `auto` by a concrete one. Returns the configuration, and the reason for the choice in a
    sentence.

    Raises ConfigError for an executor that cannot work on these hosts.
    """
    if sum(place.workers for place in places) == 1:
        found: dict[str, Any] = {name: "null" for name in _FLAGS if getattr(config, name) == "auto"}
        return replace(config, **found), "no executor: there is one worker"
    picked, reason = ("tcp", "its connections can be paced") if pace_of(config.link) else pick(places)
    names = {name: getattr(config, name) for name in _FLAGS}
    for name, value in names.items():
        _check(flag(name), value, places)
    found = {name: picked for name, value in names.items() if value == "auto"}
    asked = executors_of(config)
    config = replace(config, **found)
    if executors_of(config) != (picked, picked):
        by_choice = "as you have chosen"
        reason = f"{picked} as {reason}, the other {by_choice}" if "auto" in asked else by_choice
    return config, f"executor {shown(config)}: {reason}"


def pick(places: Sequence[HostWorkers]) -> tuple[str, str]:
    """Return the executor that `auto` stands for on these hosts, and the reason as text."""
    if all(place.gpus >= place.workers for place in places):
        return "nccl", "every worker has a GPU of its own"
    return pick_for_host_memory([place.workers for place in places])


def pick_for_host_memory(workers: Sequence[int]) -> tuple[str, str]:
    """Return the executor that `auto` stands for if tensors are in host memory, given the number of workers on each
    host, and the reason as text."""
    if len(workers) == 1:
        return "shm", "all workers are on one host"
    if max(workers) == 1:
        return "tcp", f"there are {len(workers)} hosts with one worker each"
    each = str(workers[0]) if len(set(workers)) == 1 else f"{min(workers)} to {max(workers)}"
    return "hierarchical:tcp", f"there are {len(workers)} hosts with {each} workers each"


def shown(config: Config) -> str:
    """Return the names of the executors for the user: one name, or two if broadcasts use another executor."""
    broadcast, allreduce = executors_of(config)
    return allreduce if broadcast == allreduce else f"{allreduce} (broadcasts: {broadcast})"


def _check(asked: str, name: str, places: Sequence[HostWorkers]) -> None:
    if name == "shm" and len(places) > 1:
        raise ConfigError(f"{asked} shm: works on one host only, not on {len(places)}; leave it out, or give tcp")
    if name not in ("nccl", "mpicuda"):
        return
    for place in places:
        if place.gpus < place.workers:
            raise ConfigError(
                f"{asked} {name}: {place.name or 'this host'} has {place.gpus or 'no'} NVIDIA GPUs for {place.workers}"
                " workers (nvidia-smi, /proc/driver/nvidia, CUDA_VISIBLE_DEVICES and the build of torch were asked);"
                " leave it out, or give gloo"
            )


def executors_of(config: Config) -> tuple[str, str]:
    """Return the executor for broadcasts, and the executor for all other operations."""
    return config.broadcast_executor or config.executor, config.allreduce_executor or config.executor


def mpi_executor(config: Config) -> str:
    """Return the name of the executor that uses MPI for all traffic or between hosts; empty if the job uses none."""
    return next((name for name in executors_of(config) if name.rpartition(":")[2] in ("mpi", "mpicuda")), "")
