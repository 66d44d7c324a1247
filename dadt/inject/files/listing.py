"""Lists a folder whose contents lie in two places: the real folder, and the rank's private copies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

# Imported by name, because `install` later replaces the functions in `os` by those of an overlay.
from os import listdir, scandir
from typing import Any

HALF = ".dadt-"
"""Prefix of the names of temporary folders in which a rank writes files until they are complete."""


def is_half(name: str | bytes) -> bool:
    """Whether this is the name of a temporary folder for an incomplete file: scripts should not see it, as it soon
    disappears."""
    return os.fsdecode(name).startswith(HALF)


def without_half(path: Any) -> list[Any]:
    """Return the names in a folder, as `os.listdir` does, without temporary folders for incomplete files."""
    return [name for name in listdir(path) if not is_half(name)]


class FolderEntry:
    """An `os.DirEntry` with the path by which the script knows the file, instead of where it lies."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        """folder: the path that the script has given; str or bytes, which also decides the type of the names."""
        self.name: Any = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        self.path: Any = os.path.join(folder, self.name)
        self.is_dir, self.is_file, self.is_symlink = entry.is_dir, entry.is_file, entry.is_symlink
        self.stat, self.inode = entry.stat, entry.inode

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class FolderListing(ExitStack):
    """An iterator over entries that can be closed like the one that `os.scandir` returns."""

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__()
        self._entries = iter(entries)

    @classmethod
    def of(cls, path: Any) -> FolderListing:
        """List a folder without private copies in it, leaving out temporary folders for incomplete files."""
        entries = scandir(path)
        listing = cls(entry for entry in entries if not is_half(entry.name))
        listing.callback(entries.close)
        return listing

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)
