"""A rank that exchanges with itself: all that DADT does in a step, and no peer to wait for.

A job of one exchanges nothing, and one GPU takes one rank over NCCL. So the runtime is told here that it is not alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

from dadt.comm import executors
from dadt.comm.executors.base import Connection
from dadt.train.runtime import Runtime


class Alone:
    """A Meet of one rank."""

    secret = b""
    outdated = None

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        return [blob]

    def put(self, key: str, blob: bytes) -> None:
        self._kept[key] = blob

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return [self._kept[key] for key in keys]


class Exchanging(Runtime):
    alone = False

    @cached_property
    def meet(self) -> Alone:  # type: ignore[override]
        return Alone()

    def _connected(self) -> Connection:
        return executors.connect_one(self.config.executor, self.config, self.group, self.meet)


def hook(**settings: str) -> None:
    """Hook DADT into this process as into a worker of `dadt run`, with these settings."""
    from dadt.inject import worker
    from dadt.world import World

    os.environ.update({f"DADT_{name.upper()}": value for name, value in settings.items()})
    worker.Runtime = Exchanging  # type: ignore[misc]
    worker.start(World())
