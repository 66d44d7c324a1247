"""Replacements for functions of `os` on one rank: each uses the real file, or this rank's private copy of it.

Libraries that read or write without Python's `open`, `os` and `shutil` (such as SQLite or Arrow) are not covered.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable

# Imported by name, because DADT later replaces these functions in the module `os`.
from os import chdir, link, listdir, lstat, mkdir, rename, rmdir, scandir, symlink, truncate, unlink
from os import open as os_open
from pathlib import Path
from typing import Any

from dadt.inject.files.for_good import BEGINS, ForGood
from dadt.inject.files.journal import WrittenJournal
from dadt.inject.files.listing import FolderListing, ListedFiles
from dadt.inject.files.phase import PhasedTree, in_turn
from dadt.inject.files.tree import copy, error, kind, named, on_kept_paths, pattern
from dadt.inject.files.until_closed import HeldFiles, UntilClosed
from dadt.inject.files.writers import WriteRole, Writers

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Overlay(PhasedTree):
    """Functions with the names, arguments and errors of those in `os`, which use the rank's private copies."""

    def __init__(
        self,
        root: Path,
        keeps: Callable[[str], bool],
        writers: Writers,
        journal: WrittenJournal,
        start: float,
        mark: str = ".dadt-",
        step: Callable[[], int] = lambda: 0,
        island: Path | None = None,
    ) -> None:
        """start: when the job began, in seconds since the epoch; files that are newer and in no journal were probably
        written by other ranks, without Python. mark: prefix of temporary folders. step: returns this rank's step.
        island: folder of the private copies that this rank's island shares; None without islands."""
        super().__init__(root, keeps, writers, journal.turn, island)
        self.journal = journal
        self.held = HeldFiles(self, writers, journal, mark, step)
        self._for_good = ForGood(journal, writers.is_far, self.removals)
        self._start = start
        # Paths that the first rank has saved or renamed in place of this rank, and that count as this rank's own.
        self._awaited: set[str] = set()
        self._listed = ListedFiles(journal, self._for_good.is_gone)
        self.loads: Callable[[str], None] | None = None
        """Called in a replay with the path of each real file whose contents are about to be read."""

    def role(self, path: str, *, begins: bool = False) -> WriteRole:
        """Return how this rank writes an absolute path: the real file, or a private copy."""
        self._end_apart()
        self.held.settle(path)
        return self.writers.role(path, copy=self.where(path) != path, begins=begins)

    def reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, which reads the path in its first argument, wrapped to read a private copy."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            known = self.path(path, kwargs.get("dir_fd"))
            if known is None or (where := self.where(known)) == known:
                return original(path, *args, **kwargs)
            with named(path):
                return original(where, *args, **kwargs)

        return call

    def looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, `os.stat` or `os.lstat`, wrapped to read a private copy, and to answer for files that
        another rank has removed since this rank listed them. A script may list its files, compare their ages and remove
        the oldest, while the first rank does the same."""
        reading = self.reading(original)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return reading(path, *args, **kwargs)
            except FileNotFoundError:
                known = self.path(path, kwargs.get("dir_fd"))
                listed = self._listed.removed(known) if known is not None and self.where(known) == known else None
                if listed is None:
                    raise
                return listed

        return call

    def loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, which reads a file without Python's `open`, wrapped to read a private copy."""
        reading = self.reading(original)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._tell(self.path(path))
            return reading(path, *args, **kwargs)

        return call

    def path_for_library(self, given: Any, mode: str) -> Any:
        """Return the path that a library has to open in place of `given`. mode: as for Python's `open`."""
        path = self.path(given)
        if path is None:
            return given
        if mode == "r":
            self._tell(path)
        elif self.role(path) is WriteRole.APART:
            return self.place(path, keep=not mode.startswith(("w", "x")))
        where = self.where(path)
        return given if where == path else where

    def _tell(self, path: str | None) -> None:
        if self.loads is not None and path is not None and self.where(path) == path and kind(path) == stat.S_IFREG:
            self.loads(path)

    def changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, which changes a path's attributes, wrapped so as not to change other ranks' real files."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            known = self.path(path, kwargs.get("dir_fd"))
            where = path if known is None else self.where(known)
            if known is not None and where == known and kind(where) is not None and self.role(known) is WriteRole.APART:
                return None
            with named(path):
                return original(where, *args, **kwargs)

        return call

    @on_kept_paths(os_open)
    def open(self, path: Any, known: str, flags: int, mode: int = 0o777) -> int:
        if not flags & WRITES:
            self._tell(known)
            return os_open(self.where(known), flags, mode)
        there = kind(self.where(known))
        if not ((there is None and flags & os.O_CREAT) or there in (stat.S_IFREG, stat.S_IFLNK)):
            return os_open(self.where(known), flags, mode)
        if self.role(known) is not WriteRole.APART:
            self.reveal(known)
            return self._for_good.open(known, flags, mode, self.writers.is_shared)
        appeared = self._appeared(known)
        if flags & os.O_EXCL and there is not None and not appeared:
            raise error(errno.EEXIST, path)
        return os_open(self._begin(known, flags, appeared), flags, mode)

    def open_held(self, given: Any, mode: str) -> UntilClosed | None:
        """Open and return the file if this rank writes it privately until it is closed; else return None."""
        path = self.path(given)
        if path is None or self.role(path, begins=True) is not WriteRole.UNTIL_CLOSED:
            return None
        with named(given):
            if "x" in mode and self.exists(path) and not self._appeared(path):
                raise error(errno.EEXIST, given)
            return self.held.open(given, path, mode)

    def _begin(self, path: str, flags: int, appeared: bool) -> str:
        """Return the path of a private copy to open; it has no data that other ranks have appended."""
        if flags & BEGINS:
            return self.place(path)
        if not flags & os.O_APPEND or self.where(path) != path:
            return self.place(path, keep=True)
        before = self.journal.before(path)
        known = before is not None or appeared
        private = self.place(path, keep=True, most=max(before or 0, 0) if known else None)
        if not known and kind(private) is not None and (before := self.journal.before(path)) is not None:
            truncate(private, max(before, 0))  # another rank has begun to append while this rank copied
        return private

    @on_kept_paths(truncate)
    @in_turn
    def truncate(self, path: Any, known: str, length: int) -> None:
        if self.role(known) is WriteRole.APART:
            truncate(self.place(known, keep=True), length)
        else:
            os.close(self.open(path, os.O_WRONLY))
            truncate(self.where(known), length)

    @on_kept_paths(mkdir)
    @in_turn
    def mkdir(self, path: Any, known: str, mode: int = 0o777) -> None:
        if self.role(known) is not WriteRole.APART:
            self._for_good.make(known, self.writers.is_shared, lambda: mkdir(path, mode))
            return
        where = self.where(known)
        if self.exists(known) and not (where == known and (self._appeared(known) or self._for_good.is_made(known))):
            raise error(errno.EEXIST, path)
        self._prepare(os.path.dirname(known))
        self.reveal(known)
        mkdir(self.tree + known, mode | stat.S_IRWXU)
        if where == self._none:
            self._cover(known)

    @on_kept_paths(chdir)
    def chdir(self, path: Any, known: str) -> None:
        where = self.where(known)
        # a real folder is used where it exists, so that getcwd() returns its real name
        chdir(known if where != self._none and kind(known) == stat.S_IFDIR else where)

    @on_kept_paths(unlink)
    @in_turn
    def remove(self, path: Any, known: str) -> None:
        """Remove a file. Where ranks write private copies, it may be missing: the first rank may have removed it."""
        if self.role(known) is not WriteRole.APART:
            self._remove_for_good(known, lambda: unlink(path))
            return
        where = self.where(known)
        if kind(where) == stat.S_IFDIR:
            raise error(errno.EISDIR, path)
        if where not in (known, self._none):
            unlink(where)
        if where != self._none:
            self._drop(known)

    @on_kept_paths(rmdir)
    @in_turn
    def rmdir(self, path: Any, known: str) -> None:
        if self.role(known) is not WriteRole.APART:
            self._remove_for_good(known, lambda: rmdir(path))
            return
        if self.exists(known) and not self._is_empty(known):
            raise error(errno.ENOTEMPTY, path)
        self._remove_tree(known)

    def rmtree(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            known = self.path(path, kwargs.get("dir_fd"))
            if known is None:
                original(path, *args, **kwargs)
            elif self.role(known) is WriteRole.APART:
                with self.turn():
                    self._remove_tree(known)
            else:
                self._remove_for_good(known, lambda: original(path, *args, **kwargs))

        return call

    def _remove_for_good(self, path: str, act: Callable[[], None]) -> None:
        self.reveal(path)
        with self.real():
            self._for_good.remove(path, self.writers.is_shared, act)

    @in_turn
    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        descriptors = src_dir_fd is not None or dst_dir_fd is not None
        source, target = (None, None) if descriptors else (self.path(src), self.path(dst))
        if source == target or self._rename_role(source, target) is not WriteRole.APART:
            return self._rename_for_good(src, dst, source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        with named(src), self.real():
            try:
                origin = src if source is None else self._gather(source)
            except FileNotFoundError:
                if target is None or (source is not None and kind(source) is not None):
                    raise
                return self.awaited(target, source)  # the first rank has renamed the file, or reports the error
            goal = dst if target is None else self._goal(target, kind(origin) == stat.S_IFDIR)
            try:
                rename(origin, goal)
            except OSError as failure:
                if failure.errno != errno.EXDEV:
                    raise
                shutil.move(origin, goal)  # the tree may be on another file system
            if source is not None:
                self._drop(source)
            if target is not None and kind(goal) == stat.S_IFDIR:
                self._cover(target)
            return None

    def _rename_role(self, source: str | None, target: str | None) -> WriteRole:
        path = source if source is not None else target
        return self.role(path) if path is not None else WriteRole.FOR_GOOD

    def _rename_for_good(self, src: Any, dst: Any, source: str | None, target: str | None, **kwargs: Any) -> None:
        if source is None or source == target:
            return rename(src, dst, **kwargs)
        if (private := self.where(source)) != source and target is not None:  # another rank writes the real file
            self.held.put(private, target)
            return self.reveal(source)
        with named(src), self.real():
            self._for_good.rename(src, source, dst, target, self.writers.is_shared)
        return self.reveal(target) if target is not None else None

    @in_turn
    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        known = self.path(dst, dir_fd)
        if known is None:
            return symlink(src, dst, dir_fd=dir_fd)
        if self.role(known) is not WriteRole.APART:
            return self._for_good.make(known, self.writers.is_shared, lambda: symlink(src, dst))
        if self.exists(known) and not self._appeared(known):
            raise error(errno.EEXIST, src, dst)
        target = os.path.abspath(os.path.join(os.path.dirname(known), os.fspath(src)))
        # The target is absolute, because a relative one would lead to paths in the tree, where most files have no copy.
        return symlink(self.where(target), self.place(known))

    @in_turn
    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        source, known = self.path(src), self.path(dst)
        origin = src if source is None else self.where(source)
        if known is None or self.role(known) is not WriteRole.APART:
            with named(src):
                shared = known is not None and self.writers.is_shared
                return self._for_good.make(known or "", shared, lambda: link(origin, dst, **kwargs))
        if self.exists(known) and not self._appeared(known):
            raise error(errno.EEXIST, src, dst)
        with named(src), self.real():
            return copy(origin, self.place(known))

    def listdir(self, path: Any = ".") -> list[str]:
        known = self.path("." if path is None else path)
        if known is None:
            return listdir(path)
        if self.where(known) == known:
            return self._listed.names(known, path)
        return [entry.name for entry in self._entries(known, path)]

    def scandir(self, path: Any = ".") -> Any:
        known = self.path("." if path is None else path)
        if known is None:
            return scandir(path)
        if self.where(known) == known:
            return self._listed.scan(known, path)
        return FolderListing(self._entries(known, path))

    def awaited(self, path: str, source: str | None = None) -> None:
        """Record that the first rank has saved the file in place of this rank, or renamed it from `source`."""
        self._awaited.add(path)
        self.reveal(path)
        self.journal.takes_part(path)
        self.removals[source] += 1

    def saved(self, path: str) -> None:
        """Record that this rank is about to save the real file."""
        self.reveal(path)
        self.journal.wrote(path)

    def missed(self) -> list[str]:
        """Return the paths that this rank, or its island, has written privately and that do not exist as real files."""
        if self.writers.copies and not self.writers.counts_for_island:
            return []
        kept = {pattern(path) for path in self.journal.written_by_others()}
        found = []
        with self.real():
            for folder, _, names in os.walk(self.tree):
                for name in names:
                    path = os.path.join(folder, name)[len(self.tree) :]
                    is_copy = kind(self.tree + path) == stat.S_IFREG and self.where(path) != self._none
                    if is_copy and kind(path) is None and pattern(path) not in kept:
                        found.append(path)
        return sorted(found)

    def stand_in(self, given: Any) -> None:
        """Create an empty private file for one that a replay does not write, since scripts may copy it."""
        path = self.path(given)
        if path is not None and self.role(path) is WriteRole.APART and not self.exists(path):
            os.close(os_open(self.place(path), os.O_CREAT | os.O_WRONLY, 0o600))

    def _appeared(self, path: str) -> bool:
        """Whether this rank sees the real file because another rank has made or changed it in this job."""
        try:
            return self.where(path) == path and (self.journal.is_others(path) or lstat(path).st_ctime >= self._start)
        except OSError:
            return False

    def _real_entries(self, path: str) -> list[os.DirEntry[str]]:
        return list(self._listed.scan(path, path))

    def _is_others(self, path: str) -> bool:
        return path not in self._awaited and self.journal.is_others(path)
