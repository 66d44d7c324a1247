"""Files that a script has begun to write in its replay, and writes on: they become the files themselves."""

from __future__ import annotations

import gc
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from os import open as os_open
from pathlib import Path


def reopen(tree: str) -> None:
    """Make each file that this process has open for writing in the tree of copies the file itself.

    A file open for appending goes on at the end of the real file, which already holds what the replay has written
    again. Any other replaces the real file, if there is one: the script has written the same again, up to where it is.
    """
    _flush()
    for fd, path, flags in _held(tree):
        target = path[len(tree) :]
        if flags & os.O_APPEND and Path(target).exists():
            new = os_open(target, flags & (os.O_RDWR | os.O_WRONLY) | os.O_APPEND | os.O_CREAT, 0o666)
        else:
            shutil.copyfile(path, target)
            new = os_open(target, flags & (os.O_RDWR | os.O_WRONLY | os.O_APPEND))
            os.lseek(new, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(new, fd)
        os.close(new)


def _flush() -> None:
    """Write out what Python's file objects still buffer."""
    for each in gc.get_objects():
        if issubclass(type(each), io.BufferedWriter | io.TextIOWrapper | io.BufferedRandom):
            with suppress(ValueError, OSError):  # closed, or only read
                each.flush()


def _held(tree: str) -> Iterator[tuple[int, str, int]]:
    """Descriptors of files that are open for writing, with their paths and flags."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            path = str(link.readlink())
            if not path.startswith(tree + os.sep) or path.endswith(" (deleted)"):
                continue
            told = Path(f"/proc/self/fdinfo/{link.name}").read_text()
            flags = int(told.partition("flags:")[2].split()[0], 8)
            if flags & (os.O_WRONLY | os.O_RDWR):
                yield int(link.name), path, flags
