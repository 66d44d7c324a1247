"""Memory that processes may take: a cgroup of version 1, as root."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.patience import await_that

ROOT = Path("/sys/fs/cgroup/memory")


def missing() -> str:
    """Why no memory can be limited here; empty if it can."""
    limit = ROOT / "memory.limit_in_bytes"
    return "" if limit.exists() and os.access(ROOT, os.W_OK) else "no memory cgroup can be made here"


class MemoryLimit:
    """Processes that may take no more than so much together, beside what they have already."""

    def __init__(self, name: str, megabytes: int) -> None:
        self._path = ROOT / name
        self._path.mkdir()
        (self._path / "memory.limit_in_bytes").write_text(str(megabytes << 20))

    def take(self, pids: Iterable[int]) -> None:
        for pid in pids:
            (self._path / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """What still runs moves out."""
        for pid in (self._path / "cgroup.procs").read_text().split():
            try:
                (ROOT / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue  # it has just ended
        await_that(self._removed, f"the end of what is in {self._path}")

    def _removed(self) -> bool:
        try:
            self._path.rmdir()
        except OSError:  # the kernel takes a moment for processes that end
            return False
        return True


@contextmanager
def memory_limit(name: str, megabytes: int) -> Iterator[MemoryLimit]:
    limit = MemoryLimit(name, megabytes)
    try:
        yield limit
    finally:
        limit.close()
