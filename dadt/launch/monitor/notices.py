"""What ranks say to the user: each text once, however many of them say it."""

from __future__ import annotations

from collections.abc import Callable

MOST = 10_000
"""Most different texts that are printed."""


class Notices:
    def __init__(self, say: Callable[[str, str], None]) -> None:
        """say: takes a text and its level, info or warning."""
        self._say = say
        self._said: set[str] = set()

    def say(self, text: str, level: str) -> None:
        if text not in self._said and len(self._said) < MOST:
            self._said.add(text)
            self._say(text, level)
