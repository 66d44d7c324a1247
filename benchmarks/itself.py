"""Makes a rank exchange with itself, to measure all that DADT does in a step without a peer to wait for.

A job of one rank exchanges nothing, and NCCL takes only one rank per GPU. So the rank here does not know that it is
alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

from dadt.comm import executors
from dadt.comm.executors.base import Connection
from dadt.comm.executors.meet import Meet
from dadt.train import runtime
from dadt.train.loss import recovery
from dadt.train.ranks import Ranks


class LoneRendezvous(Meet):
    """A rendezvous of one rank."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        return [blob]

    def put(self, key: str, blob: bytes) -> None:
        self._kept[key] = blob

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._kept[key] for key in keys]


class Exchanging(Ranks):
    alone = False

    @cached_property
    def meet(self) -> LoneRendezvous:  # type: ignore[override]
        return LoneRendezvous()


def _connected(self: recovery.Recovery) -> Connection:
    ranks = self._ranks
    return executors.connect_one(ranks.config.executor, ranks.config, ranks.group, ranks.meet)


def exchange_alone() -> None:
    """Make every Runtime that is created from now on exchange with itself, although it is the only rank."""
    runtime.Ranks, recovery.Recovery._connected = Exchanging, _connected  # type: ignore[misc, method-assign]


def hook(**settings: str) -> None:
    """Hook DADT into this process, as into a worker of `dadt run`, with these settings."""
    from dadt.inject import worker
    from dadt.world import World

    os.environ.update({f"DADT_{name.upper()}": value for name, value in settings.items()})
    exchange_alone()
    worker.start(World())
