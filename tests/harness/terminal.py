"""`dadt run` on a terminal of its own, and what a person would see on it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

from harness import forkserver
from harness.patience import PATIENCE, await_that
from harness.run import DADT, write_script


def _become_first() -> None:
    """What a terminal starts ends with it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A pseudo-terminal with a screen; the script's text is given, and its file is called train.py."""

    def __init__(
        self,
        folder: Path,
        script: str,
        arguments: list[str],
        width: int = 120,
        height: int = 40,
        env: Mapping[str, str] | None = None,
    ) -> None:
        is_forked = write_script(folder, script) == [forkserver.dadt()]
        python = {"DADT_PYTHON": forkserver.python()} if is_forked else {}  # only dadt itself has the terminal
        self.folder = folder
        self.text = b""
        """Everything that came, in order."""
        self._master, slave = pty.openpty()
        self._resize(slave, width, height)
        # A job of few workers prints less than this, so nothing scrolls out of sight.
        self._screen = pyte.HistoryScreen(width, height, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self.process = subprocess.Popen(
            [*DADT, "run", *arguments],
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", **python, **(env or {})},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=_become_first,
            start_new_session=True,
        )
        os.close(slave)

    @property
    def lines(self) -> list[str]:
        """What is on the screen, and what has scrolled off its top."""
        gone = ["".join(row[x].data for x in range(self._screen.columns)) for row in self._screen.history.top]
        lines = [line.rstrip() for line in [*gone, *self._screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def resize(self, width: int, height: int) -> None:
        self._screen.resize(height, width)
        self._resize(self._master, width, height)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def see(self, condition: Callable[[list[str]], object], what: str) -> list[str]:
        """Until the lines are as wanted."""
        await_that(
            lambda: condition(self.lines) or not self._read(0.1),
            lambda: "\n".join([f"{what}; there is", *self.lines]),
            meanwhile=lambda: None,
        )
        assert condition(self.lines), f"no {what}, but\n" + "\n".join(self.lines)
        return self.lines

    def finish(self) -> int:
        await_that(
            lambda: not self._read(0.1),
            lambda: "\n".join(["the end of dadt run; there is", *self.lines]),
            meanwhile=lambda: None,
        )
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            self.finish()
        self.hang_up()

    def hang_up(self) -> None:
        """As closing the window does. Idempotent."""
        if self._master >= 0:
            os.close(self._master)
        self._master = -1

    def _read(self, seconds: float) -> bool:
        """False once nothing more can come."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError as error:
            assert error.errno == errno.EIO
            return False
        self.text += data
        self._stream.feed(data)
        return bool(data)

    @staticmethod
    def _resize(terminal: int, width: int, height: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
