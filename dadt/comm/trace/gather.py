"""Exchanges bytes between ranks for the timeline, at the beginning and end of a job."""

from __future__ import annotations

import ctypes
import time
from typing import Protocol

from dadt._core import Engine, Work


class TimelinePeers(Protocol):
    """Collectives that the timeline needs. All ranks make the same calls in the same order. Raises CommError."""

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Return every rank's bytes, ordered by rank."""

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """Return every rank's bytes on rank 0; on other ranks the result has no meaning."""


class Alone:
    """The timeline's collectives in a job with a single rank."""

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        return [data]

    gather = allgather


class Through:
    """The timeline's collectives over a C++ engine that nothing else uses meanwhile. timeout: seconds for all calls
    together."""

    def __init__(self, engine: Engine, world_size: int, timeout: float) -> None:
        self._engine = engine
        self._world_size = world_size
        self._deadline = time.monotonic() + timeout

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        return self._wait(self._engine.allgather(data, name)).lanes

    def gather(self, data: bytes, name: str) -> list[bytes]:
        # An attribute keeps the memory alive, since an operation that timed out may still read it.
        self._sent = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        sends = [(0, 0)] * self._world_size
        sends[0] = (ctypes.addressof(self._sent), len(data))
        return [bytes(memoryview(each)) for each in self._wait(self._engine.exchange(sends, None, name)).received]

    def _wait(self, work: Work) -> Work:
        work.wait(max(0.0, self._deadline - time.monotonic()))
        return work
