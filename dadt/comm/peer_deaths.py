"""Handles the ends of other ranks: all operations that wait for an ended rank fail at once, with an error that names
it.

If training can continue without lost ranks, their end begins a new generation, in which the remaining ranks connect
again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from dadt.errors import CommError, CommTimeout, Mismatch, PeerLost

NAME_SECONDS = 2.0
"""Seconds that a rank waits, after a library's error, for its agent to report which rank has ended: a library may
notice a peer's end earlier."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A set of ranks that train together, until ranks are lost or join."""

    number: int = 0
    """Number of the generation: 0 for the ranks with which the job began; each loss or arrival of ranks begins the next
    one."""
    members: tuple[int, ...] = ()
    """Ranks of this generation, ascending, by their numbers in the whole job."""
    firsts: tuple[int, ...] = ()
    """The first rank on each host, which writes the files there. A replacement worker becomes first rank only if all
    ranks of the job are replacements."""
    text: str = ""
    """Text for the user that says which rank has ended, where and how."""
    handed: int = 0
    """Number of the newest generation that began when a replacement worker joined and all other ranks waited for it."""
    writers: tuple[int, ...] = ()
    """`World.folder_writer` of each member, in the order of `members`; empty if no hosts share a folder."""

    def writer(self, rank: int) -> int:
        """Return the rank that writes in this member's working folder (`World.folder_writer`), or -1 if no hosts share
        a folder."""
        return self.writers[self.members.index(rank)] if self.writers else -1


class Abort(Protocol):
    """A function that fails all pending and future operations of a connection. It may be called from any thread and
    does not block."""

    def __call__(self, reason: str, lost: bool) -> None: ...


class Deaths:
    """Knowledge of a worker about the ends of other ranks. `tell` is called by the thread that listens to the agent;
    other methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._aborts: list[Abort] = []
        self._known = threading.Event()
        """Set once an agent has reported the end of a rank, or a generation that this rank has not entered yet."""
        self._final = False
        """Whether a rank has ended without which the job cannot continue."""
        self.text = ""
        """Text of the first reported end: which rank has ended, where and how."""
        self._newest = Generation()
        self._entered = 0
        self.listening = False
        """Whether a thread listens to the agent, so that `tell` will be called if a rank ends."""
        self.preempted = False
        """Whether this rank must end soon because its host is being preempted, no matter which step the other ranks
        have reached."""
        self._left: tuple[int, str] | None = None
        """Number of steps after which a rank exited successfully while others still train, and the error text that says
        so; None if no rank has."""

    def watch(self, abort: Abort) -> None:
        """Register `abort` to be called when a rank ends, or call it at once if one has ended."""
        with self._lock:
            self._aborts = [each for each in self._aborts if each != abort] + [abort]
            text = self._newest.text if self.outdated else self.text
            known = self._known.is_set()
        if known:
            abort(text, lost=True)

    def forget(self, abort: Abort) -> None:
        """Unregister `abort`, because its operations have ended by themselves. May be called repeatedly."""
        with self._lock:
            self._aborts = [each for each in self._aborts if each != abort]

    def tell(self, text: str) -> None:
        """Report the end of a rank without which the job cannot continue, so that all operations fail. text: which rank
        has ended, where and how; only the first report counts."""
        with self._lock:
            if self._final:
                return
            self._final, self.text = True, text
            self._known.set()
            aborts = list(self._aborts)
        for abort in aborts:
            abort(text, lost=True)

    def regroup(self, generation: Generation) -> None:
        """Begin a new generation, in which its members train on without the lost ranks. Operations of the previous
        generation fail."""
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
        """Return whether a rank's end or a newer generation is reported within this many seconds."""
        return self._known.wait(seconds)

    def await_newer(self, number: int, seconds: float) -> int:
        """Wait up to `seconds` seconds for a generation above `number`. Returns the number of the newest generation."""
        with self._news:
            self._news.wait_for(lambda: self._newest.number > number, seconds)
            return self._newest.number

    @property
    def outdated(self) -> bool:
        """Whether a newer generation than this rank's own has been reported."""
        return self._newest.number > self._entered

    def enter(self, error: Exception, seconds: float) -> Generation:
        """Enter and return the newest generation. Connections of the previous one have failed with `error`.

        Raises `error` if no generation is reported within this many seconds, and PeerLost if the job cannot continue.
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
        """Report that a rank ended successfully after `steps` steps, while this rank has taken `mine`. Operations that
        both ranks have begun may still complete, so the end counts as a loss only once this rank has taken `steps`
        steps, too."""
        with self._lock:
            self._left = (steps, text)
        self.stepped(mine)

    def stepped(self, mine: int) -> None:
        """Called after each step of this rank, the last of which is number `mine`: report the end of a rank that has
        exited after as many steps."""
        if self._left is not None and mine >= self._left[0]:
            self.tell(self._left[1])

    def check(self) -> None:
        """Raise PeerLost if a rank that the job cannot do without has ended. For ranks that wait for no operation,
        whose error would tell them of the loss."""
        if self._final:
            raise PeerLost(self.text)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Context manager that replaces a CommError raised in its body by a PeerLost that names the ended rank, if a
        rank's end has caused the error."""
        try:
            yield
        except CommError as error:
            self.name(error)
            raise

    def name(self, error: CommError) -> None:
        """Raise PeerLost that names the ended rank, if a rank's end is reported within NAME_SECONDS and so explains the
        error."""
        told = isinstance(error, CommTimeout | Mismatch) or str(error) == self.text
        if self.listening and not told and self._known.wait(NAME_SECONDS) and self._final:
            raise PeerLost(self.text) from error
