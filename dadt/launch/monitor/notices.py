"""Shows the user what ranks report: each different text once, even if several ranks report it."""

from __future__ import annotations

from dadt.launch.actions import Event, Outbox

MOST = 10_000
"""Most different texts that are shown to the user."""


class Notices:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._said: set[str] = set()

    def say(self, event: Event) -> None:
        text = event.frame["text"]
        if text not in self._said and len(self._said) < MOST:
            self._said.add(text)
            self._outbox.say(text, event.frame["level"])
