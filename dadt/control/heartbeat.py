"""A memory-mapped file to which the workers of a host write their steps, so that reporting a step needs no system
call."""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
import weakref
from pathlib import Path

RECORD = struct.Struct("@qd")


class Heartbeat:
    """A file with one record per local rank, which contains its step (-1: none yet) and the time of writing.

    The file remains when a worker is killed, so the last step of the worker is known.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._file)
        """Closes the file; also called when this object is garbage-collected. May be called repeatedly."""
        self._records: mmap.mmap | None = None
        """The file mapped into memory; None in processes that only read, which would crash if another process truncated
        the mapped file."""

    @classmethod
    def create(cls, path: Path, local_size: int) -> Heartbeat:
        path.write_bytes(RECORD.pack(-1, time.monotonic()) * local_size)
        return cls(path)

    @property
    def local_size(self) -> int:
        return os.fstat(self._file).st_size // RECORD.size

    def write(self, local_rank: int, step: int) -> None:
        if self._records is None:
            self._records = mmap.mmap(self._file, 0)
        RECORD.pack_into(self._records, local_rank * RECORD.size, step, time.monotonic())

    def read(self, local_rank: int) -> tuple[int, float]:
        """Return the step that a local rank has written last, and the seconds since then; -1 and 0 if its record is
        invalid."""
        data = os.pread(self._file, RECORD.size, local_rank * RECORD.size)
        if len(data) < RECORD.size:
            return -1, 0.0
        step, written = RECORD.unpack(data)
        age = time.monotonic() - written
        return (step, age) if step >= -1 and math.isfinite(age) else (-1, 0.0)
