"""Permissions of the files that DADT writes: only this user may read them, unless an existing folder grants more. DADT
does not change the umask, which belongs to the script."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PRIVATE = 0o700


def make_folder(path: Path) -> None:
    """Create the folder and its missing parents, accessible to this user only. An existing folder keeps its
    permissions."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(PRIVATE, exist_ok=True)
    if not missing and not path.is_dir():
        path.mkdir()  # mkdir raises FileExistsError if the path is a file


def make_inner_folder(path: Path) -> None:
    """Create a folder with the permissions of its parent. Raises FileExistsError."""
    path.mkdir(PRIVATE)
    with suppress(PermissionError):  # the file system may not support permissions
        path.chmod(stat.S_IMODE(path.stat().st_mode) & stat.S_ISGID | permissions(path.parent))


def open_file(path: Path, how: str = "wb", *, inner: bool = False, **options: Any) -> IO[Any]:
    """Open a file for writing, as `Path.open` does. A new file is accessible to this user only, or has its folder's
    permissions if `inner`; an existing file keeps its permissions."""
    mode = (permissions(path.parent) if inner else PRIVATE) & 0o666

    def opener(name: str, flags: int) -> int:
        fresh = not os.path.lexists(name)
        descriptor = os.open(name, flags, mode)
        if fresh:
            with suppress(PermissionError):
                os.fchmod(descriptor, mode)  # fchmod restores permission bits that the umask has cleared
        return descriptor

    return open(path, how, opener=opener, **options)


def permissions(folder: Path) -> int:
    """Return the permissions for a new file or folder in `folder`: those of the folder itself, or private ones if the
    folder is world-writable."""
    mode = folder.stat().st_mode
    return PRIVATE if mode & stat.S_IWOTH else PRIVATE | stat.S_IMODE(mode) & 0o077
