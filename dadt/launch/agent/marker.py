"""A file by which the hosts of a job find out whether they work in the same folder, as over NFS."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Marker:
    """Lies in the working folder of its host until the workers start. Nobody can guess its name or its content."""

    def __init__(self, folder: str, job: str) -> None:
        self.name = f".dadt-{job}-{os.urandom(8).hex()}"
        self.content = os.urandom(16).hex()
        self._folder = Path(folder)
        self._made = False
        with suppress(OSError):  # a folder in which nobody can write has no writers to agree on
            (self._folder / self.name).write_text(self.content)
            self._made = True

    def describe(self) -> dict[str, str]:
        """What others look for; empty if there is no file."""
        return {"name": self.name, "content": self.content} if self._made else {}

    def seen(self, markers: Sequence[Mapping[str, Any]]) -> list[int]:
        """The numbers of those that lie in the folder of this host."""
        found = []
        for each in markers:
            with suppress(OSError, UnicodeDecodeError):
                path = self._folder / Path(each["name"]).name
                with path.open() as file:
                    if file.read(len(each["content"]) + 1) == each["content"]:
                        found.append(each["index"])
        return found

    def remove(self) -> None:
        """Idempotent."""
        with suppress(OSError):
            (self._folder / self.name).unlink(missing_ok=True)
