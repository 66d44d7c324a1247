"""The private copies of a rank in the phases of its script: while it does not know of other ranks, in a replay, and as
part of an island that writes the same files as the first one.

The ranks of an island are one job of torch, in which a rank reads what another one has written, such as the parts of a
sharded checkpoint. So in an island that is not the first, the ranks of a host share their private copies, from when
the script has its process group. What a rank has written privately before is moved to them.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

# Imported by name, because DADT later replaces these functions in the module `os`.
from os import link, listdir, lstat, readlink, symlink, unlink
from pathlib import Path
from typing import Any

from dadt.inject.files.reopening import reopen
from dadt.inject.files.tree import Tree, kind
from dadt.inject.files.writers import Writers


class PhasedTree(Tree):
    """The folder of a rank's private copies, which is another one once the rank shares them with its island."""

    def __init__(
        self,
        root: Path,
        keeps: Callable[[str], bool],
        writers: Writers,
        take_turn: Callable[[], AbstractContextManager[None]],
        island: Path | None,
    ) -> None:
        """take_turn: returns a context that only one rank of the host can be in at a time. island: folder of the copies
        that the ranks of the rank's island share on this host; None without islands."""
        super().__init__(root, keeps, *([island] if island is not None else []))
        self.writers = writers
        self._take_turn = take_turn
        self._own = self.tree
        self._shared = str(island) if island is not None else ""
        self._was_apart = False

    def path(self, given: Any, dir_fd: int | None = None) -> str | None:
        self._follow()
        return super().path(given, dir_fd)

    def place(self, path: str, *, keep: bool = False, most: int | None = None) -> str:
        with self.turn():
            return super().place(path, keep=keep, most=most)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context in which no other rank of the island makes, removes or renames private copies; without effect while
        the rank has its copies for itself. May be nested."""
        self._follow()
        if self.tree != self._shared or self.is_real or getattr(self._inside, "turn", False):
            yield
            return
        with self._take_turn():
            self._inside.turn = True
            try:
                yield
            finally:
                self._inside.turn = False

    def _follow(self) -> None:
        """Use the private copies that belong to the script's phase."""
        if not self._shared or self.is_real or (copies := self.writers.copies) == (self.tree == self._shared):
            return
        with self.real():
            if copies:
                with self._take_turn():
                    move(self._own, self._shared)
                self.tree = self._shared
            else:  # the island writes real files from now on, in place of one that was lost
                _make_real_folders(self.tree)
                self.tree = self._own
                self._forget()

    def _end_apart(self) -> None:
        """Create the folders that exist only privately as real ones, once this rank writes real files."""
        if self.writers.is_apart:
            self._was_apart = True
        elif self._was_apart:
            self._was_apart = False
            with self.real():
                _make_real_folders(self.tree)

    def take_over(self) -> None:
        """Let this rank write real files in place of the first rank, and delete its private copies."""
        self._follow()
        self._was_apart = False
        self._forget()

    def _forget(self) -> None:
        """Delete all private copies of this rank alone, and forget which files it removed privately."""
        with self.real():
            for name in listdir(self._own) if kind(self._own) is not None else ():
                shutil.rmtree(os.path.join(self._own, name), ignore_errors=True)

    def replayed(self) -> None:
        """Called when a replay has ended: delete its private copies. Files that are still open are written further,
        privately or as real files. Folders that exist only privately, such as one named by time, are kept."""
        with self.real():
            for_good = not self.writers.is_apart
            folders = [folder[len(self._own) :] for folder, _, _ in os.walk(self._own) if folder != self._own]
            new = [folder for folder in folders if kind(folder) is None]
            for folder in new if for_good else ():
                os.makedirs(folder, exist_ok=True)
            if for_good:
                reopen(self._own)
                self._was_apart = False
            self._forget()
            for folder in new if not for_good else ():
                os.makedirs(self._own + folder, exist_ok=True)


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a method of a PhasedTree that makes, removes or renames private copies."""

    @functools.wraps(method)
    def call(self: PhasedTree, *args: Any, **kwargs: Any) -> Any:
        with self.turn():
            return self.outlive(lambda: method(self, *args, **kwargs))

    return call


def move(source: str, target: str) -> None:
    """Move the files of one tree to the same places in another one, where nothing is there. Folders stay behind, empty,
    since a process may work in one."""
    for folder, folders, files in os.walk(source):
        there = target + folder[len(source) :]
        with suppress(FileExistsError, NotADirectoryError):
            os.makedirs(there, exist_ok=True)
        for path in [os.path.join(folder, name) for name in (*folders, *files)]:
            if kind(path) == stat.S_IFDIR:
                continue
            with suppress(FileExistsError, NotADirectoryError):
                _put(path, target + path[len(source) :], source, target)
            unlink(path)


def _put(path: str, goal: str, source: str, target: str) -> None:
    """Put a file of the tree `source` at a path of the tree `target`. A link to within one leads to within the
    other."""
    if stat.S_ISLNK(lstat(path).st_mode):
        leads = readlink(path)
        symlink(target + leads[len(source) :] if leads.startswith(source + os.sep) else leads, goal)
    else:
        link(path, goal)


def _make_real_folders(tree: str) -> None:
    for folder, _, _ in os.walk(tree):
        with suppress(OSError):
            os.makedirs(folder[len(tree) :] or os.sep, exist_ok=True)
