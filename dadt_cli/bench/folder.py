"""Where a measurement keeps its socket and its logs: gone with it, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dadt.control.guard import Guard


@contextmanager
def folder(mark: str = "") -> Iterator[Path]:
    """A new one, for the block. Where this process is killed, it is removed, too, and what carries the mark ends.

    mark: a variable and its value, as BENCH_KEY=...; empty: none is ended.
    """
    with TemporaryDirectory(prefix="dadt-bench-") as name:
        guard = Guard(Path(name), mark)
        try:
            yield Path(name)
        finally:
            guard.release()
