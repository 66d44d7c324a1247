"""The functions of `os` over the tree of a rank.

Functions that read or write without Python's `open`, `os` and `shutil` (those of HDF5, SQLite or Arrow) know nothing
of it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress

# Bound here, before `install` puts the overlay's functions into `os`.
from os import chdir, link, listdir, lstat, mkdir, rename, rmdir, scandir, symlink, truncate, unlink
from os import open as os_open
from pathlib import Path
from typing import Any

from dadt.inject.files.listing import Listing
from dadt.inject.files.reopening import reopen
from dadt.inject.files.tree import Tree, copy, error, kind, named

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Overlay(Tree):
    """Functions of the names, arguments and errors of those of `os`."""

    def __init__(
        self,
        root: Path,
        keeps: Callable[[str], bool],
        apart: Callable[[], bool],
        start: float,
        for_good: Callable[[], bool] = lambda: False,
    ) -> None:
        """apart: whether new writes are kept apart, still. start: when the job began, in seconds since the epoch; what
        appeared later was probably made by the first local rank. for_good: whether, beside a replay, the rank writes
        for good."""
        super().__init__(root, keeps)
        self._apart = apart
        self._for_good = for_good
        self._start = start
        self._ended = False
        self.loads: Callable[[str], None] | None = None
        """Called, in a replay, with the path of a file whose contents are about to be read, and which is not a copy."""

    def written_apart(self, given: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path of what the rank would write to a copy."""
        path = self.path(given, dir_fd)
        return path if path is not None and self._writes_apart() else None

    def reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which reads the path that is its first argument."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            known = self.path(path, kwargs.get("dir_fd"))
            if known is None or (where := self.where(known)) == known:
                return original(path, *args, **kwargs)
            with named(path):
                return original(where, *args, **kwargs)

        return call

    def loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which reads the contents of a file without Python's `open`."""
        reading = self.reading(original)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._tell(self.path(path))
            return reading(path, *args, **kwargs)

        return call

    def _tell(self, path: str | None) -> None:
        if self.loads is not None and path is not None and self.where(path) == path and kind(path) == stat.S_IFREG:
            self.loads(path)

    def changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, which changes attributes of a path: those of a copy, or none, as the first local rank does."""

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            known = self.path(path, kwargs.get("dir_fd"))
            where = path if known is None else self.where(known)
            if where == known and self._writes_apart() and kind(where) is not None:
                return None
            with named(path):
                return original(where, *args, **kwargs)

        return call

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        known = self.path(path, dir_fd)
        if known is None:
            return os_open(path, flags, mode, dir_fd=dir_fd)
        if not flags & WRITES:
            self._tell(known)
        where = self.where(known)
        with named(path):
            there = kind(where)
            creates = there is None and flags & os.O_CREAT
            if flags & WRITES and self._writes_apart() and (creates or there in (stat.S_IFREG, stat.S_IFLNK)):
                appeared = self._appeared(known)
                if flags & os.O_EXCL and there is not None and not appeared:
                    raise error(errno.EEXIST, path)
                # What is appended to a file that the first local rank has begun, begins a copy.
                anew = flags & (os.O_TRUNC | os.O_EXCL) or (flags & os.O_APPEND and appeared)
                where = self.place(known, keep=not anew)
            return os_open(where, flags, mode)

    def truncate(self, path: Any, length: int) -> None:
        known = self.written_apart(path)
        with named(path):
            truncate(path if known is None else self.place(known, keep=True), length)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        known = self.written_apart(path, dir_fd)
        if known is None:
            mkdir(path, mode, dir_fd=dir_fd)
            return
        if self.exists(known) and not self._appeared(known):
            raise error(errno.EEXIST, path)
        with named(path):
            anew = self.where(known) == self._none
            self._prepare(os.path.dirname(known))
            self.reveal(known)
            mkdir(self.tree + known, mode | stat.S_IRWXU)
            if anew:
                self._cover(known)

    def chdir(self, path: Any) -> None:
        known = self.path(path)
        where = path if known is None else self.where(known)
        if known is not None and where != self._none and kind(known) == stat.S_IFDIR:
            where = known  # a folder that others have, too, keeps its name in getcwd()
        with named(path):
            chdir(where)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        """To remove what is not there is no error: the first local rank may have removed it already."""
        known = self.written_apart(path, dir_fd)
        if known is None:
            unlink(path, dir_fd=dir_fd)
            return
        with named(path):
            where = self.where(known)
            if kind(where) == stat.S_IFDIR:
                raise error(errno.EISDIR, path)
            if where not in (known, self._none):
                unlink(where)
            if where != self._none:
                self._hide(known)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        known = self.written_apart(path, dir_fd)
        if known is None:
            rmdir(path, dir_fd=dir_fd)
            return
        if self.exists(known) and not self._is_empty(known):
            raise error(errno.ENOTEMPTY, path)
        self._remove_tree(known)

    def rmtree(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            known = self.written_apart(path, kwargs.get("dir_fd"))
            return original(path, *args, **kwargs) if known is None else self._remove_tree(known)

        return call

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        descriptors = src_dir_fd is not None or dst_dir_fd is not None
        source, target = (None, None) if descriptors else (self.path(src), self.path(dst))
        if source == target or not self._writes_apart():
            return rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        with named(src), self.real():
            try:
                origin = src if source is None else self._gather(source)
            except FileNotFoundError:
                if target is None or (source is not None and kind(source) is not None):
                    raise
                return self.reveal(target)  # the first local rank has renamed it already, or fails in its place
            goal = dst if target is None else self._goal(target, kind(origin) == stat.S_IFDIR)
            try:
                rename(origin, goal)
            except OSError as failure:
                if failure.errno != errno.EXDEV:
                    raise
                shutil.move(origin, goal)  # between file systems: the tree may lie on another one than both paths
            if source is not None:
                self._hide(source)
            if target is not None and kind(goal) == stat.S_IFDIR:
                self._cover(target)
            return None

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        known = self.written_apart(dst, dir_fd)
        if known is None:
            return symlink(src, dst, dir_fd=dir_fd)
        if self.exists(known) and not self._appeared(known):
            raise error(errno.EEXIST, src, dst)
        target = os.path.abspath(os.path.join(os.path.dirname(known), os.fspath(src)))
        # A relative one would miss, in the tree, what has no copy there.
        return symlink(self.where(target), self.place(known))

    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        source, known = self.path(src), self.written_apart(dst)
        if known is None:
            return link(src, dst, **kwargs)
        if self.exists(known) and not self._appeared(known):
            raise error(errno.EEXIST, src, dst)
        with named(src), self.real():
            return copy(src if source is None else self.where(source), self.place(known))

    def listdir(self, path: Any = ".") -> list[str]:
        known = self.path("." if path is None else path)
        if known is None or self.where(known) == known:
            return listdir(path)
        return [entry.name for entry in self._entries(known, path)]

    def scandir(self, path: Any = ".") -> Any:
        known = self.path("." if path is None else path)
        if known is None or self.where(known) == known:
            return scandir(path)
        return Listing(self._entries(known, path))

    def _writes_apart(self) -> bool:
        if not self._ended and not self._apart():
            self._ended = True
            with self.real():
                for folder, _, _ in os.walk(self.tree):  # the rank may go on to write there
                    with suppress(OSError):
                        os.makedirs(folder[len(self.tree) :] or os.sep, exist_ok=True)
        return not self._ended

    def take_over(self) -> None:
        """From now on this rank writes for good, in place of the first of its host: its copies of what that one wrote
        are forgotten."""
        self._ended = True
        self.forget()

    def forget(self) -> None:
        """All copies, and what was removed."""
        with self.real():
            for name in listdir(self.tree):
                shutil.rmtree(os.path.join(self.tree, name), ignore_errors=True)

    def stand_in(self, given: Any) -> None:
        """An empty file in place of one that is not written, where the rank sees none: scripts copy and measure it."""
        path = self.written_apart(given)
        if path is not None and not self.exists(path):
            os.close(os_open(self.place(path), os.O_CREAT | os.O_WRONLY, 0o600))

    def replayed(self) -> None:
        """A replay is over, whose copies are of no use. What is open goes on, in the tree or for good, and folders that
        are nowhere else stay, such as one named by time."""
        with self.real():
            for_good = self._for_good()
            folders = [folder[len(self.tree) :] for folder, _, _ in os.walk(self.tree) if folder != self.tree]
            new = [folder for folder in folders if kind(folder) is None]
            for folder in new if for_good else ():
                os.makedirs(folder, exist_ok=True)
            if for_good:
                reopen(self.tree)
                self._ended = True
            self.forget()
            for folder in new if not for_good else ():
                os.makedirs(self.tree + folder, exist_ok=True)

    def _appeared(self, path: str) -> bool:
        """Whether the rank sees what the first local rank has made or changed since the job began."""
        try:
            return lstat(path).st_ctime >= self._start and self.where(path) == path
        except OSError:
            return False
