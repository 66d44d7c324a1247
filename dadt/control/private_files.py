"""Who may read what DADT writes: this user alone, unless a folder that was there says otherwise. The umask is left to
the script."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PRIVATE = 0o700


def make_folder(path: Path) -> None:
    """With what is missing above it, for this user alone. One that is there stays as it is."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(PRIVATE, exist_ok=True)
    if not missing and not path.is_dir():
        path.mkdir()  # raises that there is a file


def make_inner_folder(path: Path) -> None:
    """In a folder of the user's or ours, with its permissions. Raises FileExistsError."""
    path.mkdir(PRIVATE)
    with suppress(PermissionError):  # a file system that knows no permissions
        path.chmod(stat.S_IMODE(path.stat().st_mode) & stat.S_ISGID | permissions(path.parent))


def open_file(path: Path, how: str = "wb", *, inner: bool = False, **options: Any) -> IO[Any]:
    """As `Path.open`, to write. A new file is for this user alone; an inner one has the permissions of its folder,
    and one that was there stays as it is."""
    mode = (permissions(path.parent) if inner else PRIVATE) & 0o666

    def opener(name: str, flags: int) -> int:
        fresh = not os.path.lexists(name)
        descriptor = os.open(name, flags, mode)
        if fresh:
            with suppress(PermissionError):
                os.fchmod(descriptor, mode)  # what the umask has taken away
        return descriptor

    return open(path, how, opener=opener, **options)


def permissions(folder: Path) -> int:
    """Of what is made in this folder: as it grants, but where all users make files, as in /tmp, it grants nothing."""
    mode = folder.stat().st_mode
    return PRIVATE if mode & stat.S_IWOTH else PRIVATE | stat.S_IMODE(mode) & 0o077
