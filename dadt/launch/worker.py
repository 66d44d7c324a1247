"""One worker process, seen from the agent that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from dadt.errors import LaunchError
from dadt.launch.frame import CHUNK

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Worker:
    """Leads a session and process group of its own; the kernel kills it when the agent dies, however it dies."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Starts the process. Raises LaunchError if the command cannot be run.

        Main thread of a single-threaded process only: the kernel's guard is bound to the thread that forks.
        """
        self.rank = rank
        agent = os.getpid()
        try:
            self.process = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=lambda: _die_with(agent),
            )
        except (OSError, ValueError) as error:
            raise LaunchError(f"{command[0]}: cannot be run ({_reason(error)})") from error
        assert self.process.stdout is not None and self.process.stderr is not None
        self.pipes = {"out": self.process.stdout, "err": self.process.stderr}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self.ended = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self, stream: str) -> bytes | None:
        """What has come on "out" or "err": b"" if nothing, None at the end of the stream."""
        try:
            return os.read(self.pipes[stream].fileno(), CHUNK) or None
        except BlockingIOError:
            return b""

    def signal(self, number: int) -> None:
        """To its whole process group, which may outlive it."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # all of them have ended

    def end(self, status: int) -> None:
        """Its exit status was collected (as os.wait4 gives it)."""
        self.ended = True
        self.process.returncode = os.waitstatus_to_exitcode(status)

    @property
    def returncode(self) -> int:
        """Of an ended worker; -n if signal n ended it."""
        assert self.process.returncode is not None
        return self.process.returncode


def _die_with(agent: int) -> None:
    """Runs in the child between fork and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(128 + signal.SIGKILL)  # the agent died before the guard was set


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
