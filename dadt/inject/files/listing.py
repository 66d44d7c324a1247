"""Lists a folder whose contents lie in two places, the real folder and the rank's private copies, or are changed by
other ranks meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress

# Imported by name, because DADT later replaces these functions in the module `os`.
from os import listdir, scandir
from typing import Any

from dadt.inject.files.journal import WrittenJournal

HALF = ".dadt-"
"""Prefix of the names of the temporary folders in which a rank writes files until they are complete."""


def is_half(name: str | bytes) -> bool:
    """Return whether this is the name of a temporary folder for an incomplete file. Scripts should not see such a
    folder, because it soon disappears."""
    return os.fsdecode(name).startswith(HALF)


class FolderEntry:
    """An entry like `os.DirEntry`, but with a path below the folder that the script has named, even if the file is a
    private copy in the tree."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        """folder: the path that the script has given. Names are bytes if the path is, else str."""
        self.name: Any = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        self.path: Any = os.path.join(folder, self.name)
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        if name == "_entry":  # while it is copied
            raise AttributeError(name)
        return getattr(self._entry, name)  # is_dir, stat, inode, and what later versions of Python add

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class FolderListing(ExitStack):
    """An iterator over entries that can be closed like the one that `os.scandir` returns."""

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__()
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)


class ListedFiles:
    """Lists folders without private copies in them, leaving out temporary folders for incomplete files. The last
    listing of a folder that other ranks change is remembered, because these ranks may remove files about which this
    rank's script still asks.
    """

    def __init__(self, journal: WrittenJournal, is_gone: Callable[[str], bool]) -> None:
        """is_gone: returns whether the file missing at an absolute path was removed by another rank."""
        self._journal, self._is_gone = journal, is_gone
        self._stats: dict[str, dict[str, os.stat_result]] = {}

    def names(self, folder: str, given: Any) -> list[Any]:
        """Return the names in a folder, as `os.listdir` does. folder: its absolute path. given: the path that the
        script has passed."""
        if self._journal.is_changed(folder):
            return [entry.name for entry in self._entries(folder, given)]
        return [name for name in listdir(given) if not is_half(name)]

    def scan(self, folder: str, given: Any) -> FolderListing:
        """Return the entries of a folder, as `os.scandir` does."""
        if self._journal.is_changed(folder):
            return FolderListing(self._entries(folder, given))
        entries = scandir(given)
        listing = FolderListing(entry for entry in entries if not is_half(entry.name))
        listing.callback(entries.close)
        return listing

    def _entries(self, folder: str, given: Any) -> list[os.DirEntry[Any]]:
        stats = self._stats[folder] = {}
        there = []
        with scandir(given) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another rank has removed the file since it was listed
                    if not is_half(entry.name):
                        stats[os.fsdecode(entry.name)] = entry.stat(follow_symlinks=False)
                        there.append(entry)
        return there

    def removed(self, path: str) -> os.stat_result | None:
        """If another rank has removed the file since its folder was last listed, return what `os.lstat` returned for it
        then; else None."""
        folder, name = os.path.split(path)
        stats = self._stats.get(folder, {}).get(name)
        return stats if stats is not None and self._is_gone(path) else None
