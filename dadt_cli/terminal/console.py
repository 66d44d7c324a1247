"""The only module that prints: workers' output, and DADT's own messages (on stderr)."""

from __future__ import annotations

import errno
import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TextIO

from dadt.errors import DadtError

FOLDED_WIDTH = 40
"""Minimum width in columns to which lines are wrapped, even on a narrower terminal."""
MEANWHILE_SECONDS = 0.2
STREAMS = {"out": 1, "err": 2}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ReaderGone(DadtError):
    """Raised when the program that reads dadt's output has closed the pipe. The training then ends, since nobody would
    see its output."""

    exit_code = 141


_above: Callable[[int, bytes], None] | None = None
"""Function that prints whole lines of bytes to a stream, above the live view at the bottom of the screen; None without
a view."""
_meanwhile: Callable[[], None] | None = None
_grows = False
"""Whether the last line that this process wrote is unfinished and may be continued."""
_attended = 0.0
_given_up = False
_full: set[int] = set()
"""Streams that are redirected to a file on a full disk."""


def meanwhile(act: Callable[[], None]) -> None:
    """Register a function to call regularly while the program that reads dadt's output accepts nothing (a pager,
    Ctrl-S)."""
    global _meanwhile
    _meanwhile = act


def print_by(above: Callable[[int, bytes], None] | None) -> None:
    """Print all further output by this function, which keeps the live view below it on the screen; None: print
    directly."""
    global _above
    _above = above


def size() -> tuple[int, int]:
    """Return columns and rows of the terminal; 80 and 24 if the terminal does not know its size or is closed."""
    try:
        width, height = os.get_terminal_size(STREAMS["err"])
    except OSError:
        width, height = 0, 0
    return width or 80, height or 24


def bars_move() -> bool:
    """Return whether the screen has a live view, which shows how workers' progress bars move."""
    return _above is not None


def lines(stream: str, data: bytes) -> None:
    """Print complete lines of a worker, unaltered, to stdout ("out") or stderr ("err")."""
    if _above is not None:
        _above(STREAMS[stream], data)
    else:
        write(STREAMS[stream], data)


def write(stream: int, data: bytes) -> None:
    """Write all bytes to a stream directly, without passing through the live view. If the stream's file is on a full
    disk, output is lost but training continues."""
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
            # Once select() reports room, a pipe accepts PIPE_BUF bytes at once, so os.write() does not block.
            while not select.select([], [stream], [], MEANWHILE_SECONDS)[1]:
                _attend(blocked=True)
            rest = rest[os.write(stream, rest[: select.PIPE_BUF]) :]
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise ReaderGone from error
        # EIO means that the terminal was closed. A closed terminal sends SIGHUP, which ends the job unless nohup is
        # used, so the error is ignored.
        if error.errno != errno.EIO:
            raise


def _attend(blocked: bool = False) -> None:
    """Call the function registered by `meanwhile` if enough time has passed. blocked: whether the program that reads
    dadt's output accepts nothing; if the function then raises DadtError to end the job, all remaining output is
    dropped."""
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
    """Print a message of DADT's on stderr. level: info, warning or error."""
    _write(_folded(f"dadt: warning: {text}" if level == "warning" else f"dadt: {text}"), level != "info")


def part(text: str, last: bool = False) -> None:
    """Print the next part of a line that is written piece by piece; `last` ends the line."""
    global _grows
    beginning = "" if _grows else "dadt: "
    _grows = False
    _write(beginning + text, False, "\n" if last else "")
    _grows = not last


def block(text: Sequence[str]) -> None:
    """Print a text of several lines, such as a failure; only its first line is marked as a message of DADT's."""
    _write(_folded("dadt: " + "\n".join(text)), True)


def error(text: str) -> None:
    _write(_folded(f"dadt: {text}"), True)


def text(text: str, stdout: bool = False) -> None:
    """Print a text on stderr, or on stdout if the text is the result that the command was called for."""
    _write(text, False, stream=1 if stdout else 2)


def answer(text: str) -> None:
    """Print on stdout a sentence that is the result of a command."""
    _write(_folded(text, sys.stdout), False, stream=1)


def _folded(text: str, to: TextIO | None = None) -> str:
    """Wrap lines between words to the width of the terminal. Indented lines are quotations and stay as they are. to:
    where the text is printed, stderr by default."""
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
        text, _grows = "\n" + text, False  # start a new line, since the last one is unfinished
    to = sys.stdout if stream == 1 else sys.stderr
    if loud and to.isatty():
        text = f"\x1b[1m{text}\x1b[0m"
    data = (text + end).encode(to.encoding, "backslashreplace")
    if _above is not None:
        _above(stream, data)
    else:
        to.flush()
        (_put if stream == 1 else write)(stream, data)
