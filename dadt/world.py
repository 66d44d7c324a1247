"""Who am I: rank, local rank, and how many there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This worker's place among all workers. A world of one is the default."""

    rank: int = 0
    local_rank: int = 0
    cross_rank: int = 0
    """Index of this host among the hosts."""
    world_size: int = 1
    local_size: int = 1
    job: str = ""
    """Short id of the running job; empty outside `dadt run`."""
    agent: str = ""
    """Path of the Unix socket of this host's agent; empty without one."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> World:
        return cls(
            rank=int(env.get("DADT_RANK", "0")),
            local_rank=int(env.get("DADT_LOCAL_RANK", "0")),
            cross_rank=int(env.get("DADT_CROSS_RANK", "0")),
            world_size=int(env.get("DADT_WORLD_SIZE", "1")),
            local_size=int(env.get("DADT_LOCAL_SIZE", "1")),
            job=env.get("DADT_JOB", ""),
            agent=env.get("DADT_AGENT", ""),
        )

    def to_env(self) -> dict[str, str]:
        return {
            "DADT_RANK": str(self.rank),
            "DADT_LOCAL_RANK": str(self.local_rank),
            "DADT_CROSS_RANK": str(self.cross_rank),
            "DADT_WORLD_SIZE": str(self.world_size),
            "DADT_LOCAL_SIZE": str(self.local_size),
            "DADT_JOB": self.job,
            "DADT_AGENT": self.agent,
        }
