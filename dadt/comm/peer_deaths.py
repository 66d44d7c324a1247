"""The ends of other ranks. Whatever waits for such a rank fails at once, with an error that names it.

Where training is to go on without them, their end begins a new generation: the others connect anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from dadt.errors import CommError, CommTimeout, Mismatch, PeerLost

NAME_SECONDS = 2.0
"""Seconds to wait for the agents to report which rank has ended: a library may notice a peer's end before that."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The ranks that train together from now on."""

    number: int = 0
    """0 for the ranks with which the job began; each loss or arrival of ranks begins the next number."""
    members: tuple[int, ...] = ()
    """The ranks of this generation, ascending, numbered as in the whole job."""
    firsts: tuple[int, ...] = ()
    """The first rank on each host, which writes files there. New workers count only where all ranks are new."""
    text: str = ""
    """Text for the user: which rank has ended, where and how."""
    handed: int = 0
    """The newest generation that began with a new worker for which all others had waited."""
    writers: tuple[int, ...] = ()
    """For each member, in the order of `members`, its `World.folder_writer`; empty if no hosts share a folder."""

    def writer(self, rank: int) -> int:
        """The rank that writes in this member's working folder (`World.folder_writer`), or -1."""
        return self.writers[self.members.index(rank)] if self.writers else -1


class Abort(Protocol):
    """A function that fails all operations, pending and future. Any thread may call it; it does not block."""

    def __call__(self, reason: str, lost: bool) -> None: ...


class Deaths:
    """What a worker knows of other ranks' ends. `tell` is called by the thread that listens to the agent, all else by
    any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._aborts: list[Abort] = []
        self._known = threading.Event()
        """Set once a rank's end, or a generation that this rank has not entered yet, was reported."""
        self._final = False
        """The end of a rank was reported, and the other ranks do not go on without it."""
        self.text = ""
        """The text of the first such report: which rank has ended, where and how."""
        self._newest = Generation()
        self._entered = 0
        self.listening = False
        """Whether `tell` will be called if a rank ends."""
        self.preempted = False
        """Whether this rank has to end soon, wherever the others are."""
        self._left: tuple[int, str] | None = None
        """The steps of a rank that ended well, too early, and the text about it; None if there is none."""

    def watch(self, abort: Abort) -> None:
        """Have `abort` called when a rank ends, or at once if one has ended."""
        with self._lock:
            self._aborts = [each for each in self._aborts if each != abort] + [abort]
            text = self._newest.text if self.outdated else self.text
            known = self._known.is_set()
        if known:
            abort(text, lost=True)

    def forget(self, abort: Abort) -> None:
        """Do not call `abort` any more: what it would fail has ended by itself. May be called again."""
        with self._lock:
            self._aborts = [each for each in self._aborts if each != abort]

    def tell(self, text: str) -> None:
        """Report that a rank has ended that the others need. text: which, where and how; only the first report
        counts."""
        with self._lock:
            if self._final:
                return
            self._final, self.text = True, text
            self._known.set()
            aborts = list(self._aborts)
        for abort in aborts:
            abort(text, lost=True)

    def regroup(self, generation: Generation) -> None:
        """Begin a generation: these ranks train on without the others."""
        with self._lock:
            if generation.number <= self._newest.number:
                return
            self._newest = generation
            self._known.set()
            self._news.notify_all()
            aborts = list(self._aborts)
        for abort in aborts:
            abort(generation.text, lost=True)

    def await_news(self, seconds: float) -> bool:
        """Whether a rank's end or a newer generation is reported within this many seconds."""
        return self._known.wait(seconds)

    def await_newer(self, number: int, seconds: float) -> int:
        """Wait up to `seconds` for a generation above `number`, and return the newest generation's number."""
        with self._news:
            self._news.wait_for(lambda: self._newest.number > number, seconds)
            return self._newest.number

    @property
    def outdated(self) -> bool:
        """Whether there is a newer generation than the one that this rank is in."""
        return self._newest.number > self._entered

    def enter(self, error: Exception, seconds: float) -> Generation:
        """The newest generation, in which this rank is from now on: what was connected before has failed.

        Raises the error where none is told within these seconds, and PeerLost where nobody trains on.
        """
        known = self._known.wait(seconds)
        if self._final and str(error) != self.text:
            raise PeerLost(self.text) from error
        if not known or self._final or not self.outdated:
            raise error
        with self._lock:
            self._aborts.clear()
            self._entered = self._newest.number
            if not self._final:
                self._known.clear()
            return self._newest

    def tell_left(self, text: str, steps: int, mine: int) -> None:
        """A rank has ended well after so many steps; this one has taken `mine`. What both have begun may yet be done:
        it counts once this rank has come as far."""
        with self._lock:
            self._left = (steps, text)
        self.stepped(mine)

    def stepped(self, mine: int) -> None:
        """Call this when the rank has taken `mine` steps: a rank that left earlier may count as ended now."""
        if self._left is not None and mine >= self._left[0]:
            self.tell(self._left[1])

    def check(self) -> None:
        """Raises PeerLost if a rank has ended: also a rank that waits for nobody just now need not go on."""
        if self._final:
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
        if self.listening and not told and self._known.wait(NAME_SECONDS) and self._final:
            raise PeerLost(self.text) from error
