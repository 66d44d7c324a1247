"""Writes real files (rather than a rank's private copies), and reports them to the other ranks of the host.

If several ranks request the same operation, such as renaming a file that one of them has saved, only the first of them
performs it. A removal or renaming counts as done already if another rank has removed the file since this rank wrote it.
For a file that this rank has not written, the n-th removals on all ranks count as the same operation.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from os import open as os_open

# Imported by name, because DADT later replaces these functions in the module `os`.
from os import rename, unlink
from typing import Any

from dadt.inject.files.journal import PAUSE_SECONDS, WrittenJournal
from dadt.inject.files.tree import kind

WORD_SECONDS = 1.0
"""Seconds within which a report about files that another host's rank has changed arrives."""
BEGINS = os.O_TRUNC | os.O_EXCL


class ForGood:
    """Operations on real files, coordinated between the ranks of a host.

    Paths are absolute; parameters called `given` are paths as the script has passed them, so that errors name them.
    shared: whether other ranks of the host write real files, too.
    """

    def __init__(self, journal: WrittenJournal, is_far: Callable[[str], bool], removals: Counter[str | None]) -> None:
        """is_far: returns whether ranks of other hosts can see a path, whose reports arrive later than the changes
        themselves. removals: counts how often this rank has removed each path."""
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
        """Call `act` on a real file. Return False if a rank of another host has done the same first, which no lock
        prevents, since ranks of different hosts share none. late: the error that `act` raises in this case. done:
        returns whether another rank has done the operation on a path.
        """
        try:
            act()
        except late:
            if not (shared and self._is_far(path) and done(path)):
                raise
            return False
        return True

    def _is_done(self, path: str) -> bool:
        """Return whether another rank has already done this rank's removal of the path: it has removed the file that
        this rank wrote or, if this rank wrote none, has removed the path more often than this rank."""
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
        """Return whether another rank has made the file or folder that exists at this path."""
        return self._comes_to(self.journal.is_others, path)

    def is_gone(self, path: str) -> bool:
        """Return whether the file or folder that is missing at this path was removed by another rank."""
        return self._comes_to(self.journal.is_gone, path)

    def _comes_to(self, known: Callable[[str], bool], path: str) -> bool:
        """Return whether `known(path)` is true, or becomes true within WORD_SECONDS if ranks of other hosts can see the
        path and their reports may not have arrived yet."""
        end = time.monotonic() + WORD_SECONDS
        while not known(path):
            if not self._is_far(path) or time.monotonic() >= end:
                return False
            time.sleep(PAUSE_SECONDS)
        return True

    def _tell_removed(self, path: str) -> None:
        self._removals[path] += 1
        self.journal.removed(path)
