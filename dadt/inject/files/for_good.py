"""Writes real files (rather than a rank's private copies), and reports them to the other ranks of the host.

If several ranks request the same operation, such as renaming a file that one of them has saved, the first rank to
arrive performs the operation, and for the others it counts as done. An operation counts as done if the rank's own file
was removed since the rank wrote it; the n-th removal of a path is the same operation on every rank.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from os import open as os_open

# Imported by name, because `install` later replaces the functions in `os` by those of an overlay.
from os import rename, unlink
from typing import Any

from dadt.inject.files.journal import PAUSE_SECONDS, WrittenJournal
from dadt.inject.files.tree import kind

WORD_SECONDS = 1.0
"""Seconds that a report of another host's files may take to arrive."""
BEGINS = os.O_TRUNC | os.O_EXCL


class ForGood:
    """Operations on real files, coordinated between the ranks of a host.

    Paths are absolute; parameters called `given` are the paths as the script has passed them, which errors name.
    shared: whether other ranks of the host write real files, too.
    """

    def __init__(self, journal: WrittenJournal, is_far: Callable[[str], bool], removals: Counter[str | None]) -> None:
        """is_far: returns whether ranks of other hosts see a path; their reports arrive later than the changes
        themselves. removals: how often this rank has removed each path, shared with Tree."""
        self.journal = journal
        self._is_far = is_far
        self._removals = removals

    def open(self, path: str, flags: int, mode: int, shared: bool) -> int:
        """Open the real file. If another rank has begun to write it and this rank starts it from the beginning, too,
        this rank gets a new file, so that what the other rank continues to write stays complete."""
        path = os.path.realpath(path) if kind(path) == stat.S_IFLNK else path
        with self.journal.turn() if shared else nullcontext():
            if shared and flags & BEGINS and kind(path) == stat.S_IFREG and self.journal.is_others(path):
                permissions = stat.S_IMODE(os.lstat(path).st_mode)
                unlink(path)
                self.journal.wrote(path)
                file = os_open(path, flags | os.O_CREAT, permissions)
                os.fchmod(file, permissions)
                return file
            self.journal.wrote(path)
            return os_open(path, flags, mode)

    def remove(self, path: str, shared: bool, act: Callable[[], Any]) -> None:
        """Remove a real file or folder by calling `act`, unless another rank has already removed it."""
        with self.journal.turn() if shared else nullcontext():
            if not (shared and self._is_done(path)) and self._do(act, path, shared, FileNotFoundError, self._is_done):
                self._tell_removed(path)

    def rename(self, given: Any, source: str, goal: Any, target: str | None, shared: bool) -> None:
        with self.journal.turn() if shared else nullcontext():
            if shared and self._is_done(source):
                return
            if not self._do(lambda: rename(given, goal), source, shared, FileNotFoundError, self._is_done):
                return
            self._tell_removed(source)
            if target is not None:
                self.journal.wrote(target)

    def make(self, path: str, shared: bool, act: Callable[[], Any]) -> None:
        """Make a real folder or link by calling `act`, unless another rank has already made it."""
        with self.journal.turn() if shared else nullcontext():
            if shared and kind(path) is not None and self.is_made(path):
                return
            if self._do(act, path, shared, FileExistsError, self.is_made):
                self.journal.wrote(path, new=True)

    def _do(
        self, act: Callable[[], Any], path: str, shared: bool, late: type[OSError], done: Callable[[str], bool]
    ) -> bool:
        """Call `act` on a real file. Return False if a rank of another host has just done the same, since ranks of
        different hosts share no lock. late: the error that `act` raises in this case. done: returns whether another
        rank has done the operation on a path.
        """
        try:
            act()
        except late:
            if not (shared and self._is_far(path) and done(path)):
                raise
            return False
        return True

    def _is_done(self, path: str) -> bool:
        """Whether another rank has already removed the path: the file that this rank wrote or, if this rank wrote none,
        the path more often than this rank did."""
        if kind(path) is None:
            done = self.is_gone(path)
        else:
            taken = self.journal.is_taken(path)
            done = self.journal.removals(path) > self._removals[path] if taken is None else taken
            done = done and self.journal.is_others(path)
        if done:
            self._removals[path] += 1
            return True
        return False

    def is_made(self, path: str) -> bool:
        """Whether the existing file or folder at this path was made by another rank."""
        return self._comes_to(self.journal.is_others, path)

    def is_gone(self, path: str) -> bool:
        """Whether the missing file or folder at this path was removed by another rank."""
        return self._comes_to(self.journal.is_gone, path)

    def _comes_to(self, known: Callable[[str], bool], path: str) -> bool:
        """Whether `known(path)` is true, or becomes true within WORD_SECONDS if reports of other hosts may be on their
        way."""
        end = time.monotonic() + WORD_SECONDS
        while not known(path):
            if not self._is_far(path) or time.monotonic() >= end:
                return False
            time.sleep(PAUSE_SECONDS)
        return True

    def _tell_removed(self, path: str) -> None:
        self._removals[path] += 1
        self.journal.removed(path)
