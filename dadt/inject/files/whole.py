"""Writes a file into a temporary folder next to its target and then renames it, so that nobody sees it incomplete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dadt.world import World

Write = Callable[[str], Any]


def marks(world: World) -> str:
    """Return the prefix of the names of all temporary folders in which ranks of the job write."""
    return f".dadt-{world.job}-{world.restarts}-"


def mark_of(world: World) -> str:
    """Return the prefix of the names of the temporary folders in which this rank writes."""
    return f"{marks(world)}{world.cross_rank}-{world.local_rank}-{world.rank}-"


def write_whole(path: str | Path, mark: str, write: Write) -> Any:
    """Call `write` with a path in a temporary folder next to the target, then rename the result to the target; if
    `write` fails, remove the folder. mark: prefix of the folder's name.

    The path has the target's own file name, because torch stores the file name in its archives, and files with equal
    content should have equal bytes. Permissions are those of an existing target, or follow the umask.
    """
    target = Path(path)
    try:
        folder = tempfile.mkdtemp(prefix=mark, dir=target.parent)
    except PermissionError:  # nothing can be created in the folder, but the file itself may be writable
        return write(str(target))
    beside = Path(folder) / target.name
    try:
        result = write(str(beside))
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)
