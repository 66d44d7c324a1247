"""What a folder holds that lies in two places."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


class Entry:
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


class Listing:
    """What `os.scandir` returns."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""
