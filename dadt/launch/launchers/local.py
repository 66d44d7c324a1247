"""The launcher for this host, whose agent is a child process of the launcher."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from errno import EACCES, ENOENT, ENOEXEC

from dadt.config import Config
from dadt.control import schema
from dadt.control.frame import Link
from dadt.errors import LaunchError
from dadt.launch.channel import Channel
from dadt.launch.ending.failure import signal_name
from dadt.launch.hosts.host import Host
from dadt.launch.start import standard_input

PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031


class LocalLauncher:
    """Starts agents on this machine, whatever the host's name says."""

    extends = True

    def __init__(self, config: Config) -> None:
        self._python = config.python or sys.executable

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        return [self._start() for _ in hosts]

    def command(self, host: Host) -> str:
        return f"{self._python} -u -m dadt.launch.agent"

    def close(self) -> None:
        pass  # nothing to do: an agent ends when its channel does

    def _start(self) -> Future[Channel]:
        future: Future[Channel] = Future()
        try:
            future.set_result(LocalChannel(self._python))
        except OSError as error:
            hint = " -> --python PATH" if error.errno in (ENOENT, EACCES, ENOEXEC) else ""
            future.set_exception(LaunchError(f"{self._python}: cannot be run ({error.strerror}){hint}"))
        return future


class LocalChannel:
    """An agent that leads its own session, so Ctrl-C does not reach it."""

    def __init__(self, python: str, place: Sequence[str] = (), more: Mapping[str, str] | None = None) -> None:
        """place: words before the agent's command line, such as a program that runs the agent elsewhere. more:
        additional environment variables. Raises OSError."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("DADT_")}
        with standard_input.of_launcher() as passed:
            self._process = subprocess.Popen(
                [*place, python, "-u", "-m", "dadt.launch.agent", *(f"--stdin={number}" for number in passed)],
                pass_fds=passed,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={**env, **(more or {})},
                # `python -m` first looks for modules in the current folder, where the user may have a module of the
                # same name.
                cwd="/",
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # this user's limit of pipe memory is reached; a small pipe works as well
        self._python = python
        self.link = Link(self._process.stdout.fileno(), self._process.stdin.fileno(), schema.AGENT, noisy=True)

    def hang_up(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, timeout: float) -> str:
        assert self._process.stdout is not None
        self.hang_up()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        code = self._process.returncode
        if code == 0:
            return ""
        how = f"was killed by signal {-code} ({signal_name(-code)})" if code < 0 else f"exited with code {code}"
        hint = f" -> is dadt installed for {self._python}?" if code > 0 and self._python != sys.executable else ""
        return f"the agent of this host (pid {self._process.pid}) {how}{hint}"
