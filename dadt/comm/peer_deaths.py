"""The ends of other ranks. Whatever waits for such a rank fails at once, with an error that names it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from dadt.errors import CommError, CommTimeout, Mismatch, PeerLost

NAME_SECONDS = 2.0
"""A library may notice a peer's end before the agents have told whose it was: how long that may take."""


class Abort(Protocol):
    """Fails what is pending and to come. Any thread; does not block."""

    def __call__(self, reason: str, lost: bool) -> None: ...


class Deaths:
    """One per worker. `tell` is called by the thread that hears the agent, all else by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aborts: list[Abort] = []
        self._known = threading.Event()
        self.text = ""
        """Text of all that has been told: who has ended, where and how."""
        self.listening = False
        """`tell` will be called if a rank ends."""
        self._left: tuple[int, str] | None = None
        """Steps of a rank that has left as if it had done its work, and what is to be said of it."""

    def watch(self, abort: Abort) -> None:
        """To be called when a rank ends, or at once if one has."""
        with self._lock:
            self._aborts = [each for each in self._aborts if each != abort] + [abort]
            known = self._known.is_set()
        if known:
            abort(self.text, lost=True)

    def forget(self, abort: Abort) -> None:
        """It has ended by itself. Idempotent."""
        with self._lock:
            self._aborts = [each for each in self._aborts if each != abort]

    def tell(self, text: str) -> None:
        """A rank has ended that the others need: who, where, and how. The first counts."""
        with self._lock:
            if self._known.is_set():
                return
            self.text = text
            self._known.set()
            aborts = list(self._aborts)
        for abort in aborts:
            abort(text, lost=True)

    def tell_left(self, text: str, steps: int, mine: int) -> None:
        """A rank has ended well after so many steps; this one has taken `mine`. What both have begun may yet be done:
        it counts once this rank has come as far."""
        with self._lock:
            self._left = (steps, text)
        self.stepped(mine)

    def stepped(self, mine: int) -> None:
        """This rank has taken so many steps."""
        if self._left is not None and mine >= self._left[0]:
            self.tell(self._left[1])

    def check(self) -> None:
        """Raises PeerLost if a rank has ended: also a rank that waits for nobody just now need not go on."""
        if self._known.is_set():
            raise PeerLost(self.text)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors raised within name the rank whose end has caused them, where that is known in a moment."""
        try:
            yield
        except CommError as error:
            self.name(error)
            raise

    def name(self, error: CommError) -> None:
        """Raises PeerLost that names the rank whose end has caused the error, where that is known in a moment."""
        told = isinstance(error, CommTimeout | Mismatch) or str(error) == self.text
        if self.listening and not told and self._known.wait(NAME_SECONDS):
            raise PeerLost(self.text) from error
