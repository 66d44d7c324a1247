"""Passes on what a rank proposes to do together with all others, which then find a step for it."""

from __future__ import annotations

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox
from dadt.launch.members.rendezvous import Rendezvous

MOST_PROPOSALS = 1024
"""Largest number of different proposals in one generation of ranks."""


class Proposals:
    """Sends each proposal to all ranks, once in a generation of ranks. In the next one a rank may propose it again."""

    def __init__(self, rendezvous: Rendezvous, outbox: Outbox) -> None:
        self._rendezvous, self._outbox = rendezvous, outbox
        self._generation = 0
        self._made: set[str] = set()

    def propose(self, event: Event) -> None:
        asks, current = event.frame, self._rendezvous.generation
        if self._generation != current:
            self._generation = current
            self._made.clear()
        key, made = asks["key"], self._made
        if asks["generation"] == current and key not in made and len(made) < MOST_PROPOSALS:
            made.add(key)
            self._outbox.send_all(Frame("proposal", {"key": key}))
