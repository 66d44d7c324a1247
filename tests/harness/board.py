"""A rendezvous of ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from harness.patience import PATIENCE


class Board:
    """A rendezvous (Meet) of threads."""

    secret = b"s" * 32
    outdated = None
    kept = None

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()
        self.said: list[str] = []

    def look(self, what: str, waited: float) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)

    def put(self, key: str, blob: bytes) -> None:
        with self._news:
            self._values[key] = blob
            self._news.notify_all()

    def get(self, keys: Sequence[str]) -> list[bytes]:
        with self._news:
            assert self._news.wait_for(lambda: all(key in self._values for key in keys), PATIENCE)
            return [self._values[key] for key in keys]

    def exchange(self, key: str, blob: bytes) -> list[bytes]:
        raise NotImplementedError
