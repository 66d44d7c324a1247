"""The launcher for a job on this host, whose agent is a child process of the launcher."""

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
from dadt.launch.child import AGENT, end, without_settings
from dadt.launch.ending.failure import signal_name
from dadt.launch.hosts.host import Host
from dadt.launch.start import standard_input

PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031


class LocalLauncher:
    """Starts agents on this machine, whatever name the host has."""

    extends = True

    def __init__(self, config: Config) -> None:
        self._python = config.python or sys.executable

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        return [start(self._python) for _ in hosts]

    def command(self, host: Host) -> str:
        return f"{self._python} -u -m dadt.launch.agent"

    def close(self) -> None:
        pass  # nothing to do, since each agent ends when its channel is closed


def start(python: str, place: Sequence[str] = (), more: Mapping[str, str] | None = None) -> Future[Channel]:
    """Start an agent on this machine; the parameters are those of LocalChannel."""
    future: Future[Channel] = Future()
    try:
        future.set_result(LocalChannel(python, place, more))
    except OSError as error:
        hint = " -> --python PATH" if not place and error.errno in (ENOENT, EACCES, ENOEXEC) else ""
        future.set_exception(LaunchError(f"{[*place, python][0]}: cannot be run ({error.strerror}){hint}"))
    return future


class ProcessChannel:
    """The launcher's connection to an agent through the pipes of a child process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.link = Link(process.stdout.fileno(), process.stdin.fileno(), schema.AGENT, noisy=True)

    def hang_up(self) -> None:
        self._stdin.close()

    def _await_end(self, timeout: float) -> bool:
        """Wait until the process has ended, and kill it after `timeout` seconds. Returns whether it ended by itself."""
        self.hang_up()
        ended = end(self._process, timeout)
        self._stdout.close()
        return ended


class LocalChannel(ProcessChannel):
    """The launcher's connection to an agent that it has started as a child process in a session of its own, so that
    Ctrl-C does not reach the agent."""

    def __init__(self, python: str, place: Sequence[str] = (), more: Mapping[str, str] | None = None) -> None:
        """place: words to put before the agent's command line, such as a program that runs the agent in another
        network. more: additional environment variables. Raises OSError."""
        with standard_input.of_launcher() as passed:
            process = subprocess.Popen(
                [*place, python, *AGENT, *(f"--stdin={number}" for number in passed)],
                pass_fds=passed,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={**without_settings(os.environ), **(more or {})},
                cwd="/",  # `python -m` first looks in the current folder, where a module may be named like DADT's
            )
        super().__init__(process)
        self._python = python
        for pipe in (self._stdin, self._stdout):
            try:
                fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
            except OSError:
                pass  # this user's limit of pipe memory is reached, and a smaller pipe works as well

    def end(self, timeout: float) -> str:
        self._await_end(timeout)
        code = self._process.returncode
        if code == 0:
            return ""
        how = f"was killed by signal {-code} ({signal_name(-code)})" if code < 0 else f"exited with code {code}"
        hint = f" -> is dadt installed for {self._python}?" if code > 0 and self._python != sys.executable else ""
        return f"the agent of this host (pid {self._process.pid}) {how}{hint}"
