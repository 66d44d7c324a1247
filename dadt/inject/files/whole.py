"""Writes files so that they are never seen incomplete: into a temporary folder next to the target, then renamed."""

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
    """Call `write` with a path in a temporary folder next to the target, then rename the result to the target; leave
    nothing behind if `write` fails. mark: prefix of the folder's name.

    The path ends in the target's own name, which torch stores in the archive, so the bytes do not depend on where they
    were written. Permissions are those of an existing target, or follow the umask.
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
