"""A file that is whole whenever it is there: written beside its place, and renamed into it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dadt.world import World

Write = Callable[[str], Any]


def marks(world: World) -> str:
    """How the names of the folders begin in which any rank of the job writes."""
    return f".dadt-{world.job}-{world.restarts}-"


def mark_of(world: World) -> str:
    """How those of this rank begin."""
    return f"{marks(world)}{world.cross_rank}-{world.local_rank}-{world.rank}-"


def write_whole(path: str | Path, mark: str, write: Write) -> Any:
    """Call `write` with a path beside the given one, then rename what it wrote over that, or leave nothing.

    It lies in a folder of its own, whose name begins with `mark`.

    The path ends in the target's own name, which torch stores in the archive: the bytes do not depend on
    where they were written. Permissions are the target's, or the umask's where it is new.
    """
    target = Path(path)
    try:
        folder = tempfile.mkdtemp(prefix=mark, dir=target.parent)
    except PermissionError:  # the folder is closed but the file may be writable
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
