"""Provides the standard input of a job's workers. If rank 0 runs on the launcher's host, it reads the launcher's own
standard input, which may be a terminal (so that a debugger can be used), a pipe, or a file. All other ranks read
nothing; if the launcher has a terminal, they get a pseudo-terminal of the same size, as some scripts query the size
(`stty size`)."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO

STDIN = 0


@contextmanager
def of_launcher() -> Iterator[list[int]]:
    """Context manager that yields a list with the descriptor of the launcher's standard input, for rank 0. The list is
    empty if the input is closed, or if the launcher runs in the background of its terminal."""
    try:
        passed = [os.dup(STDIN)]
    except OSError:
        passed = []
    try:
        yield passed if _is_ours() else []
    finally:
        for number in passed:
            os.close(number)


def _is_ours() -> bool:
    try:
        return not os.isatty(STDIN) or os.tcgetpgrp(STDIN) == os.getpgrp()
    except OSError:  # the terminal belongs to another session
        return False


def terminal_size() -> list[int] | None:
    """Return the numbers of lines and columns of the launcher's terminal; None if its standard input is not a
    terminal."""
    try:
        return [*reversed(os.get_terminal_size(STDIN))]
    except OSError:
        return None


class NoInput:
    """A file to use as standard input, from which every read returns end of file at once."""

    def __init__(self, size: Sequence[int] | None) -> None:
        """size: numbers of lines and columns of a pseudo-terminal that readers see; None for no terminal."""
        self._files = [open(os.devnull, "rb", 0)]  # noqa: PTH123, SIM115
        if size is not None:
            with suppress(OSError):  # some containers provide no pseudo-terminals
                self._files = _terminal(*size)

    def fileno(self) -> int:
        return self._files[-1].fileno()


def _terminal(lines: int, columns: int) -> list[FileIO]:
    """Return the two ends of a new pseudo-terminal. The first one must stay open as long as the second one is used."""
    ends = [os.fdopen(end, "rb", 0) for end in os.openpty()]
    attributes = termios.tcgetattr(ends[1])
    attributes[3] &= ~termios.ICANON
    # With VMIN and VTIME set to 0, a read returns at once instead of waiting for input.
    attributes[6][termios.VMIN] = attributes[6][termios.VTIME] = 0
    termios.tcsetattr(ends[1], termios.TCSANOW, attributes)
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    return ends
