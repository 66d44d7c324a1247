"""The only place that prints: what workers print, and what dadt itself says (on stderr)."""

from __future__ import annotations

import errno
import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TextIO

from dadt.errors import DadtError

FOLDED_WIDTH = 40
"""Columns below which lines are not folded any narrower."""
MEANWHILE_SECONDS = 0.2
STREAMS = {"out": 1, "err": 2}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ReaderGone(DadtError):
    """Whoever read our output has closed it, so there is nobody to train for."""

    exit_code = 141


class ScreenView(Protocol):
    """Something at the bottom of the screen that must be asked to make room."""

    def above(self, stream: int, data: bytes) -> None:
        """Print bytes that end with a line's end, unaltered."""


_view: ScreenView | None = None
_meanwhile: Callable[[], None] | None = None
_grows = False
"""Whether the last line that we wrote may get further parts."""
_attended = 0.0
_given_up = False
_full: set[int] = set()
"""Streams that lead to a file which takes no more."""


def meanwhile(act: Callable[[], None]) -> None:
    """What to do from time to time while whoever reads our output takes nothing (a pager, Ctrl-S)."""
    global _meanwhile
    _meanwhile = act


def show_above(view: ScreenView | None) -> None:
    """Print everything above this view from now on; None: there is no view any more."""
    global _view
    _view = view


def size() -> tuple[int, int]:
    """Columns and rows of the terminal. One that does not know its size says 0; one that was closed, nothing."""
    try:
        width, height = os.get_terminal_size(STREAMS["err"])
    except OSError:
        width, height = 0, 0
    return width or 80, height or 24


def bars_move() -> bool:
    """Whether a view shows workers' progress bars as they move."""
    return _view is not None


def lines(stream: str, data: bytes) -> None:
    """Complete lines of a worker, unaltered, to our stdout ("out") or stderr ("err")."""
    if _view is not None:
        _view.above(STREAMS[stream], data)
    else:
        write(STREAMS[stream], data)


def write(stream: int, data: bytes) -> None:
    """All of the bytes, past the view: for the view itself. A file that is full ends no training."""
    if stream in _full:
        return
    try:
        _put(stream, data)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _full.add(stream)
        name, other = ("stdout", 2) if stream == 1 else ("stderr", 1)
        write(other, f"dadt: warning: {name} is incomplete: {error.strerror}\n".encode())


def _put(stream: int, data: bytes) -> None:
    rest = memoryview(b"" if _given_up else data)
    try:
        while rest:
            _attend()
            # Where there is room, PIPE_BUF bytes are taken at once, and nobody has to wait.
            while not select.select([], [stream], [], MEANWHILE_SECONDS)[1]:
                _attend(blocked=True)
            rest = rest[os.write(stream, rest[: select.PIPE_BUF]) :]
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise ReaderGone from error
        # A terminal that was closed; it has sent SIGHUP, which ends the job unless nohup says otherwise.
        if error.errno != errno.EIO:
            raise


def _attend(blocked: bool = False) -> None:
    """Do what must go on, if it is time to. blocked: the reader takes nothing; if the job is to end at once, nobody
    waits for it any more."""
    global _attended, _given_up
    now = time.monotonic()
    if _meanwhile is None or now - _attended < MEANWHILE_SECONDS:
        return
    _attended = now
    try:
        _meanwhile()
    except DadtError:
        if blocked:
            _given_up = True
            raise


def say(text: str, level: str = "info") -> None:
    """level: info, warning or error."""
    _write(_folded(f"dadt: warning: {text}" if level == "warning" else f"dadt: {text}"), level != "info")


def part(text: str, last: bool = False) -> None:
    """The next part of a line that grows; `last` ends it."""
    global _grows
    beginning = "" if _grows else "dadt: "
    _grows = False
    _write(beginning + text, False, "\n" if last else "")
    _grows = not last


def block(text: Sequence[str]) -> None:
    """The text that is to stand last on the screen; its first line names the speaker."""
    _write(_folded("dadt: " + "\n".join(text)), True)


def error(text: str) -> None:
    _write(_folded(f"dadt: {text}"), True)


def text(text: str, stdout: bool = False) -> None:
    """Print on stderr, or on stdout where it is what the command was called for."""
    _write(text, False, stream=1 if stdout else 2)


def answer(text: str) -> None:
    """Print on stdout a sentence that the command was called for."""
    _write(_folded(text, sys.stdout), False, stream=1)


def _folded(text: str, to: TextIO | None = None) -> str:
    """Broken between words where a line is longer than the terminal is wide. What is indented is quoted, and stays.
    to: stderr where it is not given."""
    if not (to or sys.stderr).isatty():
        return text
    width = max(FOLDED_WIDTH, size()[0])
    fold = partial(
        textwrap.wrap, width=width, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
    lines = [[line] if line[:1].isspace() or len(line) <= width else fold(line) for line in text.split("\n")]
    return "\n".join(part for parts in lines for part in parts)


def _write(text: str, loud: bool, end: str = "\n", stream: int = 2) -> None:
    global _grows
    if _grows:
        text, _grows = "\n" + text, False  # something came in between
    to = sys.stdout if stream == 1 else sys.stderr
    if loud and to.isatty():
        text = f"\x1b[1m{text}\x1b[0m"
    data = (text + end).encode(to.encoding, "backslashreplace")
    if _view is not None:
        _view.above(stream, data)
    else:
        to.flush()
        (_put if stream == 1 else write)(stream, data)
