"""A view of the file system in which a rank sees its own private copies of files, which no other rank sees.

Where the first rank of the host writes the real file, each of the others writes a copy in a folder of its own, the
tree, which is deleted when the job ends: the copy of `/home/a/log.csv` is `<tree>/home/a/log.csv`. Reads see the copy
if there is one, and otherwise the real file, as with overlayfs. Files that the rank has removed are marked in the tree
by an empty file without permissions (a whiteout).

The whole state is on disk, so that forked children see the same files.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Imported by name, because DADT later replaces these functions in the module `os`.
from os import link, listdir, lstat, mkdir, readlink, rename, scandir, unlink
from os import open as os_open
from pathlib import Path
from typing import Any

from dadt.inject.files.listing import FolderEntry, is_half

DIGITS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")
WHITEOUT = stat.S_IFREG
"""st_mode of a whiteout, which marks a removed file: a regular file that nobody may read or write."""


class Tree:
    """The folder of a rank's private copies, and the view of the file system that results from it. Arguments are
    absolute paths, as the method `path` returns them."""

    def __init__(self, root: Path, keeps: Callable[[str], bool], *others: Path) -> None:
        """keeps: returns whether ranks get private copies of an absolute path. others: further folders of private
        copies, one of which may become this rank's tree."""
        self.tree = str(root)
        self._trees = tuple(str(folder) + os.sep for folder in (root, *others))
        self._keeps = keeps
        self._inside = threading.local()
        self._none = os.path.join(self.tree, ".none")
        self.removals: Counter[str | None] = Counter()
        """How often this rank has removed or renamed each path, as a private copy or as a real file."""
        self._created = 0
        """How often the tree was created again."""
        for folder in self._trees:
            os.makedirs(folder, mode=0o700, exist_ok=True)

    @contextmanager
    def real(self) -> Iterator[None]:
        """A context in which this thread accesses real files only, not private copies."""
        before = self.is_real
        self._inside.real = True
        try:
            yield
        finally:
            self._inside.real = before

    @property
    def is_real(self) -> bool:
        """Whether this thread is in a context of `real`."""
        return getattr(self._inside, "real", False)

    def path(self, given: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute path that the script means; None if ranks get no private copies of it, if it is no path,
        or if `dir_fd` is given."""
        if dir_fd is not None or isinstance(given, int) or self.is_real:
            return None
        try:
            path = os.fsdecode(given)
        except TypeError:
            return None
        if not path:
            return None
        path = os.path.abspath(path)
        if path.startswith(self._trees):  # the script's working folder is a private copy
            path = next(path[len(tree) - 1 :] for tree in self._trees if path.startswith(tree))
        return path if self._keeps(path) else None

    def where(self, path: str) -> str:
        """Return the path at which the rank finds the content of `path`: the private copy or the real file. If the rank
        has removed the file, return a path that does not exist."""
        private = self.tree + path
        try:
            mode = lstat(private).st_mode
        except FileNotFoundError:
            return path
        except NotADirectoryError:
            return self._none if self.where(os.path.dirname(path)) == self._none else private
        return self._none if mode == WHITEOUT else private

    def exists(self, path: str) -> bool:
        return kind(self.where(path)) is not None

    def is_private(self, path: str) -> bool:
        """Whether `path` exists for this rank only, as a private copy."""
        return self.where(path) != path and self.exists(path) and kind(path) is None

    def reveal(self, path: str) -> None:
        """Delete the rank's own copy, or the mark that the rank has removed the file, so that the rank sees the real
        file again."""
        with self.real():
            private = self.tree + path
            if kind(private) == stat.S_IFDIR:
                shutil.rmtree(private)
            elif kind(private) is not None:
                unlink(private)

    def place(self, path: str, *, keep: bool = False, most: int | None = None) -> str:
        """Return the path of a private copy in the tree, ready to be written. keep: preserve the content that the rank
        sees now. most: maximum number of bytes to copy from a real file; None for all."""
        with self.real():
            private = self.tree + path
            self._prepare(os.path.dirname(path))
            try:
                found = lstat(private)
            except (FileNotFoundError, NotADirectoryError):
                if keep and os.path.isfile(path) and most != 0:
                    shutil.copy(path, private)
                    if most is not None:
                        os.truncate(private, min(most, os.path.getsize(private)))
                return private
            if found.st_mode == WHITEOUT:
                unlink(private)
            elif stat.S_ISLNK(found.st_mode):
                target = readlink(private)
                return self.place(target, keep=keep, most=most) if self._keeps(target) else private
            elif found.st_nlink > 1 and stat.S_ISREG(found.st_mode):  # a hard link to a file that another rank writes
                if keep:
                    shutil.copy(private, private + ".new")
                    rename(private + ".new", private)
                else:
                    unlink(private)
            return private

    def outlive(self, act: Callable[[], Any]) -> Any:
        """Return what `act` returns, which makes private copies. It is called again if the tree was removed meanwhile,
        as by a cleaner of /tmp, since the folders that it had made in the tree are then missing."""
        while True:
            before = self._identity()
            try:
                return act()
            except (FileNotFoundError, FileExistsError):
                if self._identity() == before:
                    raise

    def _identity(self) -> tuple[int, int | None]:
        """Return what is another once the tree was removed or created."""
        try:
            return self._created, lstat(self.tree).st_ino
        except FileNotFoundError:
            return self._created, None

    def _make_root(self) -> None:
        """Create the folder of private copies, and those above it, which no other user may access, if they are
        missing."""
        if kind(self.tree) is None:
            missing = [folder for folder in (self.tree, *map(str, Path(self.tree).parents)) if kind(folder) is None]
            for folder in reversed(missing):
                with suppress(FileExistsError):
                    mkdir(folder, 0o700)
            self._created += 1

    def _prepare(self, folder: str) -> None:
        """Create the folder in the tree of private copies. Raises FileNotFoundError or NotADirectoryError if the rank
        sees no such folder."""
        with self.real():
            scandir(self.where(folder)).close()
            self._make_root()
            os.makedirs(self.tree + folder, exist_ok=True)

    def _cover(self, folder: str) -> None:
        """Hide the contents of a real folder from the rank, because a new private folder takes its place."""
        for name in listdir(folder) if kind(folder) == stat.S_IFDIR else ():
            path = os.path.join(folder, name)
            if kind(self.tree + path) is None:
                self._hide(path)
            elif kind(self.tree + path) == stat.S_IFDIR:
                self._cover(path)

    def _hide(self, path: str) -> None:
        if kind(path) is not None:
            self._prepare(os.path.dirname(path))
            os.close(os_open(self.tree + path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0))

    def _drop(self, path: str) -> None:
        """Hide a path that this rank removes or renames, and count the removal."""
        self.removals[path] += 1
        self._hide(path)

    def _remove_tree(self, path: str) -> None:
        if self.exists(path):
            self.reveal(path)
            self._drop(path)

    def _gather(self, path: str) -> str:
        """Copy the file or folder, as the rank sees it, into the tree of private copies. Return its path in the
        tree."""
        where = self.where(path)
        if where == path:
            copy(path, self.place(path))
        elif kind(where) == stat.S_IFDIR:
            for entry in self._entries(path, path):
                self._gather(entry.path)
        elif kind(where) is None:
            raise error(errno.ENOENT, path)
        return self.tree + path

    def _goal(self, target: str, folder: bool) -> str:
        """Return the path in the tree of private copies that stands for `target`, ready for a renaming. Raises OSError
        if a renaming cannot replace the target. folder: whether a folder is renamed."""
        there = kind(self.where(target))
        if there == stat.S_IFDIR and not folder:
            raise error(errno.EISDIR, target)
        if there == stat.S_IFDIR and not self._is_empty(target):
            raise error(errno.ENOTEMPTY, target)
        if there not in (None, stat.S_IFDIR) and folder:
            raise error(errno.ENOTDIR, target)
        self._prepare(os.path.dirname(target))
        self.reveal(target)
        return self.place(target)

    def _is_empty(self, folder: str) -> bool:
        return not (listdir(folder) if self.where(folder) == folder else self._entries(folder, folder))

    def _entries(self, path: str, given: Any) -> list[FolderEntry]:
        """Return the entries that the rank sees in a folder of which parts are private copies or were removed
        privately."""
        folder = os.fspath("." if given is None else given)
        with named(given), self.real():
            mine = {entry.name: entry for entry in scandir(self.where(path))}
            # os.path.isdir and not `kind`, because the path may be a link to a folder.
            there = self._real_entries(path) if os.path.isdir(path) else []
        seen = [entry for entry in mine.values() if not _is_gone(entry)]
        kinds = {pattern(entry.name) for entry in seen if kind(os.path.join(path, entry.name)) is None}
        for entry in there:
            twin = pattern(entry.name) in kinds and self._is_others(os.path.join(path, entry.name))
            if entry.name not in mine and not twin:
                seen.append(entry)
        return [FolderEntry(entry, folder) for entry in seen]

    def _real_entries(self, path: str) -> list[os.DirEntry[str]]:
        """Return the entries of a real folder, without temporary folders for incomplete files."""
        return [entry for entry in scandir(path) if not is_half(entry.name)]

    def _is_others(self, path: str) -> bool:
        """Return whether another rank has written the file in this job, and this rank has not. Subclasses override
        this."""
        return False


def pattern(path: str) -> str:
    """Return the path with each run of hexadecimal digits that contains 0-9 replaced by "#", so that names that differ
    only by a time, a number or a process id become equal."""
    return DIGITS.sub("#", path)


def _is_gone(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry of a folder in the tree is a whiteout, or has been removed since the folder was
    listed."""
    try:
        return entry.stat(follow_symlinks=False).st_mode == WHITEOUT
    except FileNotFoundError:
        return True


def kind(path: str) -> int | None:
    """Return the file type (S_IFMT of st_mode) of what is at the path; None if nothing is there."""
    try:
        return stat.S_IFMT(lstat(path).st_mode)
    except OSError:
        return None


def error(number: int, *paths: Any) -> OSError:
    return OSError(number, os.strerror(number), *paths[:1], *([None, paths[1]] if paths[1:] else []))


def copy(source: Any, target: str) -> None:
    """Copy a file or a folder, by hard links if possible. `place` separates a linked file before it is written."""
    if os.path.isdir(source):
        shutil.copytree(source, target, copy_function=copy, dirs_exist_ok=True, symlinks=True)
        return
    try:
        link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def named(given: Any) -> Iterator[None]:
    """A context in which errors name the path that the script has given, not that of a private copy."""
    try:
        yield
    except OSError as failure:
        if failure.filename is not None:
            failure.filename = given
        raise


def on_kept_paths(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a method of a Tree that stands in for `original`, such as `os.remove`. The method gets the
    path as the script has passed it, the same as an absolute path, and further arguments. `original` is called for
    paths of which ranks get no private copies. Errors name the path that the script has passed."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Tree, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if (known := self.path(path, dir_fd)) is None:
                return original(path, *args, **(kwargs if dir_fd is None else {**kwargs, "dir_fd": dir_fd}))
            with named(path):
                return self.outlive(lambda: method(self, path, known, *args, **kwargs))

        return call

    return decorate
