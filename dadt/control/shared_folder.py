"""Finds out which hosts work in the same folder, for example over NFS, and which rank writes there for all of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Marker:
    """A file in a host's working folder, by which the other hosts find out whether they see the same folder. Its random
    name and content cannot be guessed."""

    def __init__(self, folder: str, job: str) -> None:
        self.name = f".dadt-{job}-{os.urandom(8).hex()}"
        self.content = os.urandom(16).hex()
        self._folder = Path(folder)
        self._made = False
        with suppress(OSError):  # a folder in which this host cannot write needs no agreement on a writer
            (self._folder / self.name).write_text(self.content)
            self._made = True

    def describe(self) -> dict[str, str]:
        """Return the marker file's name and content, so that other hosts can look for it; an empty dictionary if it
        could not be written."""
        return {"name": self.name, "content": self.content} if self._made else {}

    def seen(self, markers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the indices of those markers of other hosts whose files are found in this host's working folder."""
        found = []
        for each in markers:
            with suppress(OSError, UnicodeDecodeError):
                path = self._folder / Path(each["name"]).name
                with path.open() as file:
                    if file.read(len(each["content"]) + 1) == each["content"]:
                        found.append(each["index"])
        return found

    def remove(self) -> None:
        """Remove the marker file if it exists. May be called repeatedly."""
        with suppress(OSError):
            (self._folder / self.name).unlink(missing_ok=True)


def writers(places: Mapping[int, tuple[int, int | None]], firsts: Collection[int] | None = None) -> dict[int, int]:
    """Return the writing rank for each rank whose working folder several hosts share; other ranks are missing from the
    result.

    places: for each rank, in order, its host and the number of its working folder (None: unknown). firsts: ranks that
    may write in a shared folder, by default all; the first of these ranks in each folder is its writing rank.
    """
    hosts: defaultdict[int, set[int]] = defaultdict(set)
    writer: dict[int, int] = {}
    for rank, (host, folder) in places.items():
        if folder is not None:
            hosts[folder].add(host)
            if firsts is None or rank in firsts:
                writer.setdefault(folder, rank)
    return {
        rank: writer[folder]
        for rank, (_, folder) in places.items()
        if folder is not None and folder in writer and len(hosts[folder]) > 1
    }
