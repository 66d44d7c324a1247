"""Hides what a script prints during its replay, since the original run has already printed it."""

from __future__ import annotations

import os
import sys
from os import open as os_open  # imported by name, before DADT replaces it in `os`
from pathlib import Path


class HeldOutput:
    """Redirects standard output and standard error to a file between the calls of `hold` and `release`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[int, int] = {}

    def hold(self) -> None:
        file = os_open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            self._kept[number] = os.dup(number)
            os.dup2(file, number)
        os.close(file)

    def release(self) -> None:
        """Restore the original standard output and error. May be called more than once."""
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            if (kept := self._kept.pop(number, None)) is not None:
                stream.flush()
                os.dup2(kept, number)
                os.close(kept)
