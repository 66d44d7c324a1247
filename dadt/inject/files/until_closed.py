"""Files that a rank writes as private copies until they are closed, because it is not known earlier whether the first
rank writes them, too."""

from __future__ import annotations

import io
import os
import stat
import weakref
from collections.abc import Callable
from os import open as os_open
from typing import Any

from dadt.inject.files.journal import WrittenJournal
from dadt.inject.files.tree import Tree, copy, kind
from dadt.inject.files.whole import write_whole
from dadt.inject.files.writers import Writers

BUFFER_BYTES = 1 << 17
STEPS = 2
"""Steps after which a file that is still open becomes the real file. Ranks are at most one step apart, so a first rank
that writes the same file would have begun by then."""


class UntilClosed(io.FileIO):
    """A private copy open for writing, whose `name` is the path that the script has passed."""

    def __init__(self, name: Any, mode: str, opener: Callable[[str, int], int], closed: Callable[[], None]) -> None:
        """closed: called once, when the process that opened the file closes it."""
        self._closed = closed
        self._pid = os.getpid()
        super().__init__(name, mode, opener=opener)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if os.getpid() == self._pid:
                self._closed()


class HeldFiles:
    """The files that this rank writes as private copies until they are closed. When a copy has become the real file, it
    is kept for up to STEPS more steps, so that each rank still reads what it wrote itself if the first rank then writes
    the same path.
    """

    def __init__(
        self, tree: Tree, writers: Writers, journal: WrittenJournal, mark: str, step: Callable[[], int]
    ) -> None:
        """mark: prefix of the names of temporary folders. step: returns this rank's step."""
        self._tree = tree
        self._writers = writers
        self._journal = journal
        self._mark = mark
        self._step = step
        self._open: dict[str, tuple[weakref.ref[UntilClosed], int]] = {}
        self._placed: dict[str, int] = {}
        """For each path whose private copy this rank has put in place of the real file, the step in which it did so."""

    def open(self, given: Any, path: str, mode: str) -> UntilClosed | None:
        """Open a private copy for writing. Returns None if something other than a regular file is at the path."""
        if kind(self._tree.where(path)) not in (None, stat.S_IFREG):
            return None

        def opener(name: str, flags: int) -> int:
            return os_open(self._tree.place(path), flags, 0o666)

        raw = UntilClosed(given, mode.replace("b", "").replace("t", ""), opener, lambda: self._close(path))
        self._open[path] = weakref.ref(raw), self._step()
        return raw

    def settle(self, path: str) -> None:
        """Called before this rank uses the path: delete the private copy if this rank was also the last to write the
        real file."""
        if self._placed.pop(path, None) is not None and self._journal.writer(path) == self._journal.rank:
            self._tree.reveal(path)

    def stepped(self) -> None:
        """Called after each step of this rank: turn files that have been open for STEPS steps into real files, and
        delete copies that were put in place STEPS steps ago."""
        if not (self._open or self._placed):
            return
        before = self._step() - STEPS
        for path in [path for path, (_, since) in self._open.items() if since <= before]:
            self._adopt(path)
        for path in [path for path, since in self._placed.items() if since <= before]:
            self.settle(path)

    def hand_over(self) -> None:
        """Turn each open private copy into the real file, because this process ends, or because a new process may read
        the files."""
        for path in list(self._open):
            self._adopt(path)

    def put(self, private: str, path: str) -> bool:
        """Put a private copy in place of the real file, unless the real file is left to another rank that has written
        it. Return whether it was put in place."""
        with self._journal.turn(), self._tree.real():
            if not self._writers.puts_in_place(self._journal.is_others(path)):
                return False
            if not os.path.isdir(os.path.dirname(path)):
                return False
            self._journal.wrote(path)
            write_whole(path, self._mark, lambda name: copy(private, name))
            return True

    def _close(self, path: str) -> None:
        if self._open.pop(path, None) is None:
            return
        private = self._tree.where(path)
        if private != path and kind(private) == stat.S_IFREG and self.put(private, path):
            self._placed[path] = self._step()

    def _adopt(self, path: str) -> None:
        """Turn an open private copy into the real file, so that this rank's further writes go to the real file."""
        ref, _ = self._open.pop(path)
        raw, private = ref(), self._tree.where(path)
        if raw is None or raw.closed or private == path or not self.put(private, path):
            return
        with self._tree.real():
            self._tree.reveal(path)  # deletes the private copy, whose content is now the real file
            file = os_open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.lseek(file, os.lseek(raw.fileno(), 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(file, raw.fileno(), inheritable=False)
            os.close(file)


def is_held(mode: Any, closefd: bool) -> bool:
    """Return whether a file opened in this mode may be written privately until it is closed, which requires that it is
    written from its beginning and not read."""
    return isinstance(mode, str) and closefd and not {"w", "x"}.isdisjoint(mode) and "+" not in mode


def wrapped(
    raw: UntilClosed, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> Any:
    """Return the text or binary file object that `open` would return for a raw file."""
    if buffering == 0:
        return raw if "b" in mode else io.TextIOWrapper(raw)  # raises ValueError, because text needs a buffer
    buffer = io.BufferedWriter(raw, BUFFER_BYTES if buffering <= 1 else buffering)
    if "b" in mode:
        return buffer
    text = io.TextIOWrapper(buffer, io.text_encoding(encoding), errors, newline, buffering == 1)
    setattr(text, "mode", mode)  # noqa: B010 (as `open` does)
    return text
