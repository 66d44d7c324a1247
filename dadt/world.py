"""This process's rank, local rank and world size, read from the environment."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Intel MPI sets the same variables as MPICH.
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # srun comes last, because it may start the daemons of other launchers, whose workers then have srun's variables,
    # too.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
"""Launchers other than `dadt run`, each with its variables for rank, world size, local rank and local size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This worker's rank, local rank and similar numbers among all workers of the job. The defaults describe a job with
    a single worker."""

    rank: int = 0
    local_rank: int = 0
    cross_rank: int = 0
    """Index of this host among the hosts of the job, from 0."""
    world_size: int = 1
    local_size: int = 1
    address: str = ""
    """Address at which other hosts reach this host; empty if all ranks are on one host."""
    job: str = ""
    """Short id of the running job; empty outside `dadt run`."""
    agent: str = ""
    """Path of the Unix socket of this host's agent; empty if there is no agent."""
    rank_in_arguments: bool = False
    """Whether the command line of the script contains its rank."""
    restarts: int = 0
    """Number of times that the job has been started again."""
    joins: bool = False
    """Whether this worker was started while the job was running, in place of a lost worker."""
    folder_writer: int = -1
    """The only rank whose files go into the working folder, if several hosts share this folder; -1 if the hosts do not
    share it."""
    island_size: int = 0
    """Number of ranks of each island: consecutive ranks that the script's own torch.distributed connects, and that are
    averaged with the ranks at the same place in other islands; 0 without islands."""
    may_divide: bool = False
    """Whether the launcher restarts the job in islands if the script shards its model over all hosts (`--island
    auto`)."""
    shard_size: int = 0
    """Number of consecutive ranks over which the script's own device mesh of all ranks shards the model (HSDP); DADT
    averages ranks that hold the same part. 0 without such a mesh."""
    divisors: str = ""
    """For each rank, the number by which it divides the script's batch size (`--batch memory`), separated by commas;
    empty if no rank divides it."""
    generation: int = 0
    """Number of times that the set of ranks has changed because ranks were lost or have joined."""
    launcher: str = ""
    """The launcher (a key of LAUNCHERS) that started this worker; empty for `dadt run`."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> World:
        def read(kind: type, text: str) -> Any:
            return text == "1" if kind is bool else kind(text)

        kinds = {field.name: type(field.default) for field in fields(cls)}
        return cls(**{name: read(kinds[name], env[each]) for name, each in VARIABLES.items() if each in env})

    @classmethod
    def from_launcher(cls, env: Mapping[str, str] = os.environ) -> World:
        """Return the World described by the variables of another launcher, such as torchrun; a World of a single worker
        if no such variables are set."""
        for launcher, (rank, size, local_rank, local_size) in LAUNCHERS.items():
            if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in env:
                continue  # users may also set RANK by hand, but only torchrun sets TORCHELASTIC_RUN_ID
            if not {rank, size, local_rank, local_size} <= env.keys():
                continue
            here = env[local_size]
            return cls(
                launcher=launcher,
                rank=int(env[rank]),
                world_size=int(env[size]),
                local_rank=int(env[local_rank]),
                local_size=_tasks(here, int(env.get("SLURM_NODEID", "0"))) if launcher == "srun" else int(here),
            )
        return cls()

    @property
    def equals(self) -> range:
        """The ranks that hold the same part of the model as this one, including this one; all ranks if each holds the
        whole model."""
        return range(self.rank % self.parts, self.world_size, self.parts)

    @property
    def parts(self) -> int:
        """Number of consecutive ranks over which one copy of the model is sharded; 1 if every rank holds the whole
        model."""
        return self.island_size or self.shard_size or 1

    def is_of_first(self, firsts: Collection[int]) -> bool:
        """Return whether this rank stores a part of the first copy of the model on its host; if each rank holds the
        whole model, whether it is the host's first rank. firsts: the first rank of each host; empty while no ranks were
        lost and none have joined."""
        if firsts:
            return any(first // self.parts == self.rank // self.parts for first in firsts)
        return self.local_rank < self.parts and not self.joins

    @property
    def island(self) -> int:
        """Index of this rank's island; without islands, its rank."""
        return self.rank // (self.island_size or 1)

    def among(self, members: Sequence[int], generation: int) -> World:
        """Return the World of this worker among `members` alone, numbered in the order of `members`."""
        return replace(self, rank=members.index(self.rank), world_size=len(members), generation=generation)

    def to_env(self) -> dict[str, str]:
        values = {variable: getattr(self, name) for name, variable in VARIABLES.items()}
        return {
            variable: ("1" if value else "") if isinstance(value, bool) else str(value)
            for variable, value in values.items()
        }


VARIABLES = {
    field.name: f"DADT_{field.name.upper()}"
    for field in fields(World)
    if field.name not in ("generation", "launcher", "shard_size")
}
"""Environment variables from which a worker of `dadt run` reads the fields of its World. A field that is false is an
empty text."""


def master(env: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return address and port of torch's rendezvous, or None if the environment does not set both."""
    if not env.get("MASTER_ADDR") or not env.get("MASTER_PORT", "").isdigit():
        return None
    return env["MASTER_ADDR"], int(env["MASTER_PORT"])


def torchrun_attempt(env: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """Return whether torchrun itself serves a store at the address that `master` returns, and how often torchrun has
    restarted the workers."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True", env.get("TORCHELASTIC_RESTART_COUNT", "0")


def ranked(numbers: Sequence[int]) -> str:
    """Return ranks as text, such as "rank 2" or "ranks 0, 2"."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def see(gpu: str) -> None:
    """Make one GPU visible to this process, named as in CUDA_VISIBLE_DEVICES. Call it before CUDA is first used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def see_all() -> None:
    """Make all GPUs visible that the host's agent sees, if this worker was limited to one GPU. Call it before CUDA is
    first used."""
    if gpus := os.environ.get("DADT_GPUS"):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    elif gpus == "":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


def threads_chosen(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment sets the number of threads of a process, by OMP_NUM_THREADS."""
    return "OMP_NUM_THREADS" in env


def speak_over(interface: str) -> None:
    """Make Gloo and NCCL use this network interface, unless the user has chosen an interface for them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def outlive_peers() -> None:
    """Keep torch's watchdog from ending this process when NCCL fails, unless the user has set the environment variable
    for this. Its second name is for torch before 2.2."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        os.environ.setdefault(name, "0")


def tell_horovod(place: Mapping[str, int]) -> None:
    """Set HOROVOD_RANK and similar variables, in which scripts for Horovod find their rank, world size and so on.
    place: the numbers by name, such as RANK."""
    os.environ.update({f"HOROVOD_{name}": str(number) for name, number in place.items()})


def adopt() -> None:
    """Mark this process as the worker, so that its child processes, which inherit the launcher's variables, do not act
    as workers."""
    os.environ["DADT_INJECT"] = "none"


def _tasks(counts: str, node: int) -> int:
    """Return the number of tasks on a node from Slurm's notation, in which "2(x3),1" is 2 on the first three nodes, 1
    on the fourth."""
    for part in counts.split(","):
        count, _, repeated = part.partition("(x")
        node -= int(repeated.rstrip(")")) if repeated else 1
        if node < 0:
            return int(count)
    return 1
