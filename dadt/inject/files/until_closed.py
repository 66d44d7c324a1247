"""Files that a rank writes apart until they are closed. Only then is known whether the first rank writes them, too."""

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
"""A file that is open for longer becomes the file itself: ranks are one step apart at most, so that the first one would
have begun it by then."""


class UntilClosed(io.FileIO):
    """Open for writing in the tree, under the name that the script has given."""

    def __init__(self, name: Any, mode: str, opener: Callable[[str, int], int], closed: Callable[[], None]) -> None:
        """closed: called once, when the process that has opened it closes it."""
        self._closed = closed
        self._pid = os.getpid()
        super().__init__(name, mode, opener=opener)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if os.getpid() == self._pid:
                self._closed()


class HeldFiles:
    """The files that this rank writes apart until they are closed. A file that is in place keeps its copy for a while,
    until it is known that the first rank does not write the same path at this moment: until then each reads what it
    wrote."""

    def __init__(
        self, tree: Tree, writers: Writers, journal: WrittenJournal, mark: str, step: Callable[[], int]
    ) -> None:
        """mark: how the names of folders begin in which files are made whole. step: that of this rank."""
        self._tree = tree
        self._writers = writers
        self._journal = journal
        self._mark = mark
        self._step = step
        self._open: dict[str, tuple[weakref.ref[UntilClosed], int]] = {}
        self._placed: dict[str, int] = {}
        """For each path that was put in place, the step of this rank in which it was."""

    def open(self, given: Any, path: str, mode: str) -> UntilClosed | None:
        """The open file; None where that path cannot be held."""
        if kind(self._tree.where(path)) not in (None, stat.S_IFREG):
            return None

        def opener(name: str, flags: int) -> int:
            return os_open(self._tree.place(path), flags, 0o666)

        raw = UntilClosed(given, mode.replace("b", "").replace("t", ""), opener, lambda: self._close(path))
        self._open[path] = weakref.ref(raw), self._step()
        return raw

    def settle(self, path: str) -> None:
        """Call this before this rank does anything with the path: drops its copy, if this rank wrote what is in
        place."""
        if self._placed.pop(path, None) is not None and self._journal.writer(path) == self._journal.rank:
            self._tree.reveal(path)

    def stepped(self) -> None:
        """Call this when this rank has taken a step: files open for STEPS steps become the files themselves, and copies
        kept for STEPS steps are dropped."""
        if not (self._open or self._placed):
            return
        before = self._step() - STEPS
        for path in [path for path, (_, since) in self._open.items() if since <= before]:
            self._adopt(path)
        for path in [path for path, since in self._placed.items() if since <= before]:
            self.settle(path)

    def hand_over(self) -> None:
        """Make each open file the file itself, as this process ends, or another one gets it."""
        for path in list(self._open):
            self._adopt(path)

    def put(self, private: str, path: str) -> bool:
        """Put a copy in place, unless another rank is the one that writes there. Returns whether it did."""
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
        """Put the copy in place, so that what this rank goes on to write goes to the file itself."""
        ref, _ = self._open.pop(path)
        raw, private = ref(), self._tree.where(path)
        if raw is None or raw.closed or private == path or not self.put(private, path):
            return
        with self._tree.real():
            self._tree.reveal(path)  # or it would be one file by two names
            file = os_open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.lseek(file, os.lseek(raw.fileno(), 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(file, raw.fileno(), inheritable=False)
            os.close(file)


def is_held(mode: Any, closefd: bool) -> bool:
    """Whether a file of this mode is held: one that is only written, from its beginning."""
    return isinstance(mode, str) and closefd and not {"w", "x"}.isdisjoint(mode) and "+" not in mode


def wrapped(
    raw: UntilClosed, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> Any:
    """The file object that `open` returns for it."""
    if buffering == 0:
        return raw if "b" in mode else io.TextIOWrapper(raw)  # raises: text has a buffer
    buffer = io.BufferedWriter(raw, BUFFER_BYTES if buffering <= 1 else buffering)
    if "b" in mode:
        return buffer
    text = io.TextIOWrapper(buffer, io.text_encoding(encoding), errors, newline, buffering == 1)
    setattr(text, "mode", mode)  # noqa: B010 (as `open` does)
    return text
