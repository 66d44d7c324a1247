"""The agent of this host: a child of the launcher."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

from dadt.launch.frame import Link

PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031


class LocalAgent:
    """An agent process and the link to it. It leads its own session, so Ctrl-C does not reach it."""

    host = ""

    def __init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("DADT_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dadt.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=env,
            cwd="/",  # python -m looks for modules in the current folder first, and there is the user's own
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            fcntl.fcntl(self._process.stdout, F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # this user's share of pipe memory is used up: a small pipe does as well
        self.link = Link(self._process.stdout.fileno(), self._process.stdin.fileno(), noisy=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, timeout: float) -> int:
        """Hang up and wait for its end, which comes by SIGKILL after `timeout` seconds. Returns its exit code,
        -n where signal n ended it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        return self._process.returncode
