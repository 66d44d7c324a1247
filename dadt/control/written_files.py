"""Records which files the workers of a host have written. Each worker appends lines to a file in the job's folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

NAME = "written"
REMOVED = -2
"""Value that stands for the size in the line about a file that was removed."""


def line(rank: int, size: int, path: str) -> bytes:
    """Return a line which says that this rank writes to `path`, for the file that lists what workers have written.
    size: bytes of the file that was at `path` before; -1 if there was none; REMOVED if the rank removes the file."""
    return f"{json.dumps([rank, size, path])}\n".encode()


def add(folder: Path, rank: int, size: int, path: str) -> None:
    """Append a line which says that a worker of another host has written to `path` in a folder that both hosts see.
    Does nothing if a cleaner of /tmp has removed the job's folder."""
    with suppress(OSError), (folder / NAME).open("ab", buffering=0) as file:
        file.write(line(rank, size, path))
