"""What the workers of a host have written: the file in the folder of the job to which each adds a line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

NAME = "written"
REMOVED = -2
"""Stands for the size in a line that reports a removal."""


def line(rank: int, size: int, path: str) -> bytes:
    """The line about a path that this rank writes. size: bytes of what was there before; -1 for nothing; or REMOVED."""
    return f"{json.dumps([rank, size, path])}\n".encode()


def add(folder: Path, rank: int, size: int, path: str) -> None:
    """Add what a worker of another host has written in a folder that both see. Where a cleaner has removed the file,
    the workers go on without."""
    with suppress(OSError), (folder / NAME).open("ab", buffering=0) as file:
        file.write(line(rank, size, path))
