"""How ranks bring bytes together, at the beginning and end of a job: over an engine, or alone."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dadt._core import Engine, Work


class TimelinePeers(Protocol):
    """All ranks call the same in the same order. Raises CommError."""

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Every rank's bytes, by rank."""

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """The same on rank 0; what it is elsewhere does not matter."""


class Alone:
    """A world of one."""

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        return [data]

    gather = allgather


class Through:
    """Over an engine that nobody else uses meanwhile, in `timeout` seconds for all calls together."""

    def __init__(self, engine: Engine, world_size: int, timeout: float) -> None:
        self._engine = engine
        self._world_size = world_size
        self._deadline = time.monotonic() + timeout

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        return self._wait(self._engine.allgather(data, name)).lanes

    def gather(self, data: bytes, name: str) -> list[bytes]:
        # KeepAlive: an operation that was not done in time may still read from it.
        self._sent = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        sends = [(0, 0)] * self._world_size
        sends[0] = (ctypes.addressof(self._sent), len(data))
        return [bytes(memoryview(each)) for each in self._wait(self._engine.exchange(sends, None, name)).received]

    def _wait(self, work: Work) -> Work:
        work.wait(max(0.0, self._deadline - time.monotonic()))
        return work
