"""Records what the workers of a host have written: each worker appends lines to a file in the job's folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

NAME = "written"
REMOVED = -2
"""Stands in place of the size in a line that reports a removed file."""


def line(rank: int, size: int, path: str) -> bytes:
    """Return a line for the file that lists what workers have written: this rank writes to `path`. size: bytes of the
    file that was there before; -1 if there was none; or REMOVED."""
    return f"{json.dumps([rank, size, path])}\n".encode()


def add(folder: Path, rank: int, size: int, path: str) -> None:
    """Append a line about what a worker of another host has written in a folder that both hosts see. Does nothing if a
    cleaner has removed the job's folder."""
    with suppress(OSError), (folder / NAME).open("ab", buffering=0) as file:
        file.write(line(rank, size, path))
