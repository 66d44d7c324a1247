"""Creates a temporary folder for the socket and logs of a measurement, which is removed even if the measurement is
killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dadt.control.guard import Guard


@contextmanager
def folder(mark: str = "") -> Iterator[Path]:
    """Create a temporary folder for the block. If this process is killed, the folder is still removed, and processes
    with the mark in their environment are ended.

    mark: a variable and its value, such as BENCH_KEY=...; if empty, no process is ended.
    """
    with TemporaryDirectory(prefix="dadt-bench-") as name:
        guard = Guard(Path(name), mark)
        try:
            yield Path(name)
        finally:
            guard.release()
