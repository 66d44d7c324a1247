"""Permissions of the files that DADT writes: only this user may read them, unless an existing folder grants more. The
umask is left to the script."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PRIVATE = 0o700


def make_folder(path: Path) -> None:
    """Make the folder and its missing parents, for this user only. An existing folder stays as it is."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(PRIVATE, exist_ok=True)
    if not missing and not path.is_dir():
        path.mkdir()  # raises FileExistsError, as there is a file


def make_inner_folder(path: Path) -> None:
    """Make a folder with the permissions of its parent. Raises FileExistsError."""
    path.mkdir(PRIVATE)
    with suppress(PermissionError):  # a file system without permissions
        path.chmod(stat.S_IMODE(path.stat().st_mode) & stat.S_ISGID | permissions(path.parent))


def open_file(path: Path, how: str = "wb", *, inner: bool = False, **options: Any) -> IO[Any]:
    """Open a file for writing, as `Path.open` does. A new file is for this user only, or has the permissions of its
    folder if `inner`; an existing file stays as it is."""
    mode = (permissions(path.parent) if inner else PRIVATE) & 0o666

    def opener(name: str, flags: int) -> int:
        fresh = not os.path.lexists(name)
        descriptor = os.open(name, flags, mode)
        if fresh:
            with suppress(PermissionError):
                os.fchmod(descriptor, mode)  # restores the bits that the umask cleared
        return descriptor

    return open(path, how, opener=opener, **options)


def permissions(folder: Path) -> int:
    """Permissions for a file or folder made in this folder: the folder's own, but private if it is world-writable."""
    mode = folder.stat().st_mode
    return PRIVATE if mode & stat.S_IWOTH else PRIVATE | stat.S_IMODE(mode) & 0o077
