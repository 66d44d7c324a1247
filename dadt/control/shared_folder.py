"""Hosts that work in the same folder, as over NFS: how they find that out, and which rank writes there for all."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Marker:
    """A file that lies in the working folder of its host until the others have looked for it. Nobody can guess its name
    or its content."""

    def __init__(self, folder: str, job: str) -> None:
        self.name = f".dadt-{job}-{os.urandom(8).hex()}"
        self.content = os.urandom(16).hex()
        self._folder = Path(folder)
        self._made = False
        with suppress(OSError):  # a folder in which nobody can write has no writers to agree on
            (self._folder / self.name).write_text(self.content)
            self._made = True

    def describe(self) -> dict[str, str]:
        """The file's name and content, for which others look; empty if it could not be written."""
        return {"name": self.name, "content": self.content} if self._made else {}

    def seen(self, markers: Sequence[Mapping[str, Any]]) -> list[int]:
        """The indices of those markers whose files lie in the working folder of this host."""
        found = []
        for each in markers:
            with suppress(OSError, UnicodeDecodeError):
                path = self._folder / Path(each["name"]).name
                with path.open() as file:
                    if file.read(len(each["content"]) + 1) == each["content"]:
                        found.append(each["index"])
        return found

    def remove(self) -> None:
        """Remove the file, if it is there. May be called again."""
        with suppress(OSError):
            (self._folder / self.name).unlink(missing_ok=True)


def writers(places: Mapping[int, tuple[int, int | None]], firsts: Collection[int] | None = None) -> dict[int, int]:
    """For each rank whose working folder several hosts share: the rank that writes there for good. Other ranks are left
    out.

    places: for each rank, in order, its host and the number of its working folder (None: not known). firsts: the ranks
    that may write for good, by default all; the first of them in a folder does.
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
