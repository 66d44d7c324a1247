"""Turns private copies that a script opened during its replay, and continues to write after the replay, into real
files."""

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
    """Redirect each descriptor of this process that is open for writing on a private copy in `tree` to the real file.

    A file open for appending continues at the end of the real file, which already contains what the replay has written
    again. Any other file is replaced by its private copy, in which the script has written the same content again up to
    its current position.
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
    """Flush the buffers of all Python file objects in this process."""
    for each in gc.get_objects():
        if issubclass(type(each), io.BufferedWriter | io.TextIOWrapper | io.BufferedRandom):
            with suppress(ValueError, OSError):  # the file is closed, or was opened only for reading
                each.flush()


def _held(tree: str) -> Iterator[tuple[int, str, int]]:
    """Yield the descriptors of files in the tree of private copies that are open for writing, with their paths and
    flags."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            path = str(link.readlink())
            if not path.startswith(tree + os.sep) or path.endswith(" (deleted)"):
                continue
            told = Path(f"/proc/self/fdinfo/{link.name}").read_text()
            flags = int(told.partition("flags:")[2].split()[0], 8)
            if flags & (os.O_WRONLY | os.O_RDWR):
                yield int(link.name), path, flags
