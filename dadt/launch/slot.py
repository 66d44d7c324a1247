"""Places for workers, and who gets which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dadt.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place for one worker: its rank, its host, and its part of the host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    cross_rank: int = 0
    host: str = ""
    """Empty: this host."""
    gpu: str | None = None
    """What CUDA_VISIBLE_DEVICES shall say; None leaves it as it is."""
    threads: int = 1
    """CPU threads for each of its parallel regions."""

    def world(self, job: str) -> World:
        return World(
            rank=self.rank,
            local_rank=self.local_rank,
            cross_rank=self.cross_rank,
            world_size=self.world_size,
            local_size=self.local_size,
            job=job,
        )


def place(count: int, gpus: Sequence[str], cores: int) -> list[Slot]:
    """`count` workers on this host: a GPU each where GPUs are given, and an equal part of the cores."""
    return [
        Slot(
            rank=rank,
            world_size=count,
            local_rank=rank,
            local_size=count,
            gpu=gpus[rank] if gpus else None,
            threads=max(1, cores // count),
        )
        for rank in range(count)
    ]
