"""Computes the ranks that torch sees in the script. These are the ranks in the whole job or, with islands, in the
rank's island, which is a torch world of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dadt.config import Config
from dadt.config.check import in_islands
from dadt.errors import ConfigError
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.node import Node


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchWorld:
    """A worker's ranks as torchrun would pass them to the worker. Each host is one group."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    group_rank: int
    group_count: int
    address: str
    port: int
    """Port on which the first rank serves torch's rendezvous."""
    gpus: str = ""
    """The GPUs of the island's ranks on this host, in the notation of CUDA_VISIBLE_DEVICES; empty without islands or
    GPUs."""


def fewest(config: Config) -> int:
    """Return the number of workers that training needs to begin: the value of `--min-np` if it is set and there are no
    islands, otherwise all. 0 if the number of workers depends on the hosts."""
    return config.np if in_islands(config.island) else config.min_np or config.np


def island_size(text: str, slots: Sequence[Slot]) -> int:
    """Return the number of ranks in an island for this value of `--island`; 0 without islands. Raises ConfigError if
    the ranks cannot be divided into equal islands."""
    if not in_islands(text):
        return 0
    shares = sorted({slot.local_size for slot in slots}, reverse=True)
    if text == "host":
        if len(shares) > 1:
            raise ConfigError(
                f"--island host: the hosts have {' and '.join(map(str, shares))} workers, and islands must be equal;"
                " give -np and hosts such that all have as many"
            )
        return shares[0]
    size = int(text)
    if len(slots) % size:
        raise ConfigError(f"--island {size}: {len(slots)} workers cannot be divided by {size}; give another number")
    return size


def may_divide(text: str, slots: Sequence[Slot]) -> bool:
    """Return whether the job would start again, with each host as an island, if the script turned out to shard its
    model over all ranks."""
    return text == "auto" and slots[0].world_size > slots[0].local_size > 1 and len({s.local_size for s in slots}) == 1


def worlds(slots: Sequence[Slot], nodes: Sequence[Node], size: int) -> list[TorchWorld]:
    """Return each rank's TorchWorld, by rank. size: number of ranks of an island; 0 without islands."""
    size = size or len(slots)
    # for each host, the number of islands (groups of ranks that share a model) whose first rank runs there
    begun = [0] * len(nodes)
    found: list[TorchWorld] = []
    for begin in range(0, len(slots), size):
        island = slots[begin : begin + size]
        first = island[0].cross_rank
        port = nodes[first].report["ports"][begun[first] % len(nodes[first].report["ports"])]
        begun[first] += 1
        here = Counter(slot.cross_rank for slot in island)
        gpus: dict[int, list[str]] = {host: [] for host in here}
        for slot in island if size < len(slots) else ():
            gpus[slot.cross_rank] += [slot.gpu] if slot.gpu is not None else []
        groups = {host: number for number, host in enumerate(here)}
        seen = dict.fromkeys(here, 0)
        for number, slot in enumerate(island):
            found.append(
                TorchWorld(
                    rank=number,
                    world_size=size,
                    local_rank=seen[slot.cross_rank],
                    local_size=here[slot.cross_rank],
                    group_rank=groups[slot.cross_rank],
                    group_count=len(groups),
                    address=nodes[first].address or "127.0.0.1",
                    port=port,
                    gpus=",".join(gpus[slot.cross_rank]),
                )
            )
            seen[slot.cross_rank] += 1
    return found
