"""Where each worker of a host writes its step: shared memory, so that a sign of life costs no system call."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

RECORD = struct.Struct("@qd")


class Pulse:
    """One record per local rank: its step (-1: none yet) and when it was written.

    Survives its writer, so the step of a worker that was killed is known.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._records = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, local_size: int) -> Pulse:
        path.write_bytes(RECORD.pack(-1, time.monotonic()) * local_size)
        return cls(path)

    @property
    def local_size(self) -> int:
        return len(self._records) // RECORD.size

    def write(self, local_rank: int, step: int) -> None:
        RECORD.pack_into(self._records, local_rank * RECORD.size, step, time.monotonic())

    def read(self, local_rank: int) -> tuple[int, float]:
        """The step, and the seconds since it was written."""
        step, written = RECORD.unpack_from(self._records, local_rank * RECORD.size)
        return step, time.monotonic() - written
