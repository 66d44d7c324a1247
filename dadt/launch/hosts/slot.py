"""Slots, which are places for workers on hosts, and the assignment of ranks to slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dadt.errors import ConfigError
from dadt.world import World

SHOWN = 16
"""Largest number of hosts whose slots a message lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place for one worker: its rank, its host, and its share of the host's GPUs and CPU threads."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    cross_rank: int = 0
    host: str = ""
    """Name of the host; empty in a job that runs on this host only."""
    address: str = ""
    """Address at which other hosts reach the slot's host; empty in a job of one host."""
    gpu: str | None = None
    """Value of CUDA_VISIBLE_DEVICES for the worker; None leaves the variable unchanged."""
    island_size: int = 0
    """Number of ranks of each island (a torch world of its own); 0 without islands."""
    may_divide: bool = False
    """Whether the job may start again with its ranks divided into islands (see `World.may_divide`)."""
    divisors: str = ""
    """The numbers by which ranks divide the script's batch size (see `World.divisors`)."""
    threads: int = 1
    """Number of CPU threads that the worker may use, for example in OpenMP's parallel regions."""

    def world(self, job: str) -> World:
        return World(
            rank=self.rank,
            local_rank=self.local_rank,
            cross_rank=self.cross_rank,
            world_size=self.world_size,
            local_size=self.local_size,
            address=self.address,
            island_size=self.island_size,
            may_divide=self.may_divide,
            divisors=self.divisors,
            job=job,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRoom:
    """The slots, GPUs and cores that one host offers."""

    host: str = ""
    slots: int = 0
    """Number of slots that the user has set for the host; 0 means one per GPU, or a single one without GPUs."""
    gpus: Sequence[str] = ()
    """GPUs of the host, of which each worker gets one; empty if workers get no GPU, or see all GPUs."""
    cores: int = 1
    machine: str = ""
    """Id of the machine, which shows whether two names mean the same machine; empty if unknown."""

    @property
    def places(self) -> int:
        return self.slots or len(self.gpus) or 1


def share_out(count: int, rooms: Sequence[HostRoom]) -> list[int]:
    """Return how many of `count` workers each host gets if hosts are filled in order. count: 0 means one worker per
    slot. Raises ConfigError if there are too few slots, or fewer GPUs than workers on a host."""
    places = [room.places for room in rooms]
    if count > sum(places):
        offers = ", ".join(f"{room.host or 'this host'}:{room.places}" for room in rooms[:SHOWN])
        offers += ", ..." if len(rooms) > SHOWN else ""
        remedy = "start fewer workers, or give hosts more slots, as host:4"
        raise ConfigError(f"-np {count}: the hosts have {sum(places)} slots ({offers}); {remedy}")
    left = count or sum(places)
    shares = []
    for room in rooms:
        share = min(room.places, left)
        left -= share
        if room.gpus and share > len(room.gpus):
            seen = f"{len(room.gpus)} GPUs are" if len(room.gpus) > 1 else "1 GPU is"
            problem = (
                f"only {seen} visible; start fewer workers, or give --gpu-visibility all to let workers share GPUs"
            )
            raise ConfigError(f"{f'{share} workers on {room.host}' if room.host else f'-np {share}'}: {problem}")
        shares.append(share)
    _check_owners(rooms, shares)
    return shares


def _check_owners(rooms: Sequence[HostRoom], shares: Sequence[int]) -> None:
    """Raise ConfigError if two hosts are the same machine and one of its GPUs would get two workers."""
    owners: dict[tuple[str, str], HostRoom] = {}
    for room, share in zip(rooms, shares, strict=True):
        for gpu in room.gpus[:share] if room.machine else ():
            owner = owners.setdefault((room.machine, gpu), room)
            if owner is not room:
                raise ConfigError(
                    f"{owner.host} and {room.host} are one machine, and both would use its GPU {gpu}: name it once, "
                    "with all of its slots, or give --gpu-visibility all"
                )


def place(shares: Sequence[int], rooms: Sequence[HostRoom], addresses: Sequence[str]) -> list[Slot]:
    """Assign ranks to the hosts in their order, each with a GPU if the host offers GPUs, and an equal part of the
    host's cores."""
    slots: list[Slot] = []
    world_size = sum(shares)
    for cross_rank, (share, room, address) in enumerate(zip(shares, rooms, addresses, strict=True)):
        for local_rank in range(share):
            slot = Slot(
                rank=len(slots),
                world_size=world_size,
                local_rank=local_rank,
                local_size=share,
                cross_rank=cross_rank,
            )
            slots.append(move(slot, room, address))
    return slots


def move(slot: Slot, room: HostRoom, address: str) -> Slot:
    """Return the slot moved to another host, whose resources are `room` and which other hosts reach at `address`."""
    gpu = room.gpus[slot.local_rank] if room.gpus else None
    return replace(slot, host=room.host, address=address, gpu=gpu, threads=max(1, room.cores // slot.local_size))
