"""Finds out whether a full disk has caused an error, and which disk. Some errors do not mention it: torch.save reports
an "unexpected pos" instead."""

from __future__ import annotations

import errno
import functools
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEXT = re.compile(r"\[Errno (?:28|122)\] [^:\n]*(?:: '(?P<path>[^'\n]+)')?|No space left on device")
_LEAST = 64 << 10
"""Free bytes below which a disk counts as full."""
_KEY = "__dadt_disk__"
_MARK = ".dadt-"
"""Prefix of the names of folders in which files are written until they are complete."""
_MOST_PATHS = 200


def noting(write: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `write` wrapped so that an error caused by a full disk records this fact at once: the partial file may be
    removed soon, and then the disk has space again. name: the name of the second parameter of `write`, which is a path
    or an open file."""

    @functools.wraps(write)
    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Exception as error:
            path = _path_of(args[1] if len(args) > 1 else kwargs.get(name))
            if path is not None and (text := _full(path)):
                error.__dict__[_KEY] = text
            raise

    return noted


def text_of(error: BaseException) -> str:
    """Return a text about the full disk and its free space if a full disk has caused the error; otherwise an empty
    string."""
    chain = list(_chain(error))
    for each in chain:
        if _KEY in each.__dict__:
            return str(each.__dict__[_KEY])
    for each in chain:
        if isinstance(each, OSError) and each.errno in _FULL:
            paths: Iterator[Path] = _near(each, each.filename)
        elif (found := _TEXT.search(str(each))) is not None:
            paths = _near(each, found["path"])  # the error comes from another process, so only its text is known
        else:
            continue
        return next(filter(None, map(_full, paths)), "")
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, and one after another the exceptions from which it was raised or during whose handling it was
    raised."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _near(error: BaseException, path: Any) -> Iterator[Path]:
    """Yield paths that may be on the full disk: `path`, then paths and files in the local variables of the functions
    that have failed, the innermost first, then usual temporary folders."""
    if isinstance(path, str):
        yield Path(path)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    count = 0
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            if count < _MOST_PATHS and (found := _path_of(value)) is not None:
                count += 1
                yield found
    yield from map(Path, ("here", f"{tempfile.gettempdir()}/here", "/dev/shm/here"))


def _path_of(value: Any) -> Path | None:
    try:
        name = value if isinstance(value, (str, os.PathLike)) else getattr(value, "name", None)
        if isinstance(name, (str, os.PathLike)) and 0 < len(text := os.fspath(name)) < 4096 and "\n" not in str(text):
            return Path(str(text))
    except Exception:  # noqa: BLE001 (it may be anybody's object)
        pass
    return None


def _full(path: Path) -> str:
    """Return a text about the disk on which a file at this path would lie, if the disk is full; otherwise an empty
    string."""
    folder = path.absolute().parent
    if folder.name.startswith(_MARK):
        folder = folder.parent
    try:
        disk = os.statvfs(folder)
    except (OSError, ValueError):
        return ""
    free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if whole and free < _LEAST:
        return f"the disk of {folder} is full: {_size(free)} of {_size(whole)} are free"
    if disk.f_files and not disk.f_favail:
        return f"the disk of {folder} takes no more files: none of {disk.f_files:,} is free, {_size(free)} are"
    return ""


def _size(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min((max(count, 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{count / 1024**power:.{min(power, 1)}f} {units[power]}"
