"""What the workers of a job read from their standard input.

Rank 0 reads the launcher's own, if it runs on the launcher's host: a terminal on which a debugger can ask, a pipe, or
a file. All others read nothing, from a terminal of the same size if the launcher has one, as scripts such as
`stty size` look at it.
"""

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
    """A descriptor for rank 0; none if it is closed, or if a shell in the foreground reads the terminal."""
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
    except OSError:  # it is another session's terminal
        return False


def terminal_size() -> list[int] | None:
    """Lines and columns of the launcher's terminal; None if its standard input is none."""
    try:
        return [*reversed(os.get_terminal_size(STDIN))]
    except OSError:
        return None


class NoInput:
    """A file of which every read is at the end at once."""

    def __init__(self, size: Sequence[int] | None) -> None:
        """size: lines and columns of the terminal that it looks like; None for no terminal."""
        self._files = [open(os.devnull, "rb", 0)]  # noqa: PTH123, SIM115
        if size is not None:
            with suppress(OSError):  # some containers have no pseudo-terminals
                self._files = _terminal(*size)

    def fileno(self) -> int:
        return self._files[-1].fileno()


def _terminal(lines: int, columns: int) -> list[FileIO]:
    """The two ends of a pseudo-terminal; the first is to stay open."""
    ends = [os.fdopen(end, "rb", 0) for end in os.openpty()]
    attributes = termios.tcgetattr(ends[1])
    attributes[3] &= ~termios.ICANON
    attributes[6][termios.VMIN] = attributes[6][termios.VTIME] = 0  # a read does not wait for what never comes
    termios.tcsetattr(ends[1], termios.TCSANOW, attributes)
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    return ends
