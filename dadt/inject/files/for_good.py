"""What a rank writes for good, told to the other ranks of its host.

Where several ranks do the same (each renames the file that one of them has saved, or removes the oldest one), the first
that comes to it does it, and the others find it done: a rank's own file was removed since it wrote it, or the n-th
removal of a path is every rank's n-th.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

# Bound here, before `install` puts functions of an overlay into `os`.
from os import link, mkdir, rename, symlink, unlink
from os import open as os_open
from typing import Any

from dadt.inject.files.journal import PAUSE_SECONDS, WrittenJournal
from dadt.inject.files.tree import kind

WORD_SECONDS = 1.0
"""How long word of what another host has written may take."""
BEGINS = os.O_TRUNC | os.O_EXCL


class ForGood:
    """Paths are absolute; `given` are those that the script has given, which errors name. shared: other ranks of the
    host write for good, too."""

    def __init__(self, journal: WrittenJournal, is_far: Callable[[str], bool], removals: Counter[str | None]) -> None:
        """is_far: whether ranks of other hosts see a path; their reports come later than what they have done. removals:
        as for Tree."""
        self.journal = journal
        self._is_far = is_far
        self._removals = removals

    def open(self, path: str, flags: int, mode: int, shared: bool) -> int:
        """Open a file for good. If another rank has begun it, and this one begins it too, it becomes a new file, so
        that what the other rank goes on to write stays whole."""
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

    def mkdir(self, given: Any, path: str, mode: int, shared: bool) -> None:
        self._make(path, shared, lambda: mkdir(given, mode))

    def symlink(self, given: Any, source: Any, path: str, shared: bool) -> None:
        self._make(path, shared, lambda: symlink(source, given))

    def link(self, given: Any, source: Any, path: str, shared: bool, **kwargs: Any) -> None:
        self._make(path, shared, lambda: link(source, given, **kwargs))

    def remove(self, path: str, shared: bool, act: Callable[[], Any]) -> None:
        """act: removes a file or a folder."""
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

    def _make(self, path: str, shared: bool, act: Callable[[], Any]) -> None:
        with self.journal.turn() if shared else nullcontext():
            if shared and kind(path) is not None and self.is_made(path):
                return
            if self._do(act, path, shared, FileExistsError, self.is_made):
                self.journal.wrote(path, new=True)

    def _do(
        self, act: Callable[[], Any], path: str, shared: bool, late: type[OSError], done: Callable[[str], bool]
    ) -> bool:
        """Whether this rank has done it, and no rank of another host just before: those have no turn in common. late:
        what is raised then, where `done`."""
        try:
            act()
        except late:
            if not (shared and self._is_far(path) and done(path)):
                raise
            return False
        return True

    def _is_done(self, path: str) -> bool:
        """Whether another rank has removed it: the very file, or as often as this one is about to."""
        if kind(path) is None:
            done = self._comes_to(self.journal.is_gone, path)
        else:
            taken = self.journal.is_taken(path)
            done = self.journal.removals(path) > self._removals[path] if taken is None else taken
            done = done and self.journal.is_others(path)
        if done:
            self._removals[path] += 1
            return True
        return False

    def is_made(self, path: str) -> bool:
        """Whether what is there is another rank's."""
        return self._comes_to(self.journal.is_others, path)

    def _comes_to(self, known: Callable[[str], bool], path: str) -> bool:
        """Whether it is known, or comes to be where word of other hosts may be under way."""
        end = time.monotonic() + WORD_SECONDS
        while not known(path):
            if not self._is_far(path) or time.monotonic() >= end:
                return False
            time.sleep(PAUSE_SECONDS)
        return True

    def _tell_removed(self, path: str) -> None:
        self._removals[path] += 1
        self.journal.removed(path)
