"""What a folder holds that lies in two places."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

# Bound here, before `install` puts functions of an overlay into `os`.
from os import listdir, scandir
from typing import Any

HALF = ".dadt-"
"""Begins the names of folders in which a rank writes what is not whole yet."""


def is_half(name: str | bytes) -> bool:
    """Whether this is the name of a folder in which a rank writes a file: scripts are not to see it, as it is soon
    gone."""
    return os.fsdecode(name).startswith(HALF)


def without_half(path: Any) -> list[Any]:
    """The names in a folder, as `os.listdir` returns them, without folders of files that are not whole yet."""
    return [name for name in listdir(path) if not is_half(name)]


class FolderEntry:
    """An `os.DirEntry` under the path by which the script knows it."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        """folder: a path of str or bytes, of which the entry's names are, too."""
        self.name: Any = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        self.path: Any = os.path.join(folder, self.name)
        self.is_dir, self.is_file, self.is_symlink = entry.is_dir, entry.is_file, entry.is_symlink
        self.stat, self.inode = entry.stat, entry.inode

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class FolderListing:
    """An iterator over entries that closes like the one that `os.scandir` returns."""

    def __init__(self, entries: Iterable[Any], close: Callable[[], None] = lambda: None) -> None:
        self._entries = iter(entries)
        self._close = close

    @classmethod
    def of(cls, path: Any) -> FolderListing:
        """The entries of a folder that lies in one place only, without folders of files that are not whole yet."""
        entries = scandir(path)
        return cls((entry for entry in entries if not is_half(entry.name)), entries.close)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> FolderListing:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._close()
