"""A worker process of the agent's host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from dadt.control.frame import CHUNK
from dadt.errors import LaunchError
from dadt.launch.child import spawn

STREAMS = ("out", "err")


class Worker:
    """A process that leads its own session and process group. The kernel kills it when its parent dies."""

    def __init__(self, rank: int, pid: int, out: int, err: int) -> None:
        """out, err: descriptors of the worker's output; this object closes them."""
        self.rank = rank
        self.pid = pid
        self.pipes = {"out": os.fdopen(out, "rb", 0), "err": os.fdopen(err, "rb", 0)}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self.ended = False
        self.returncode = 0
        """Exit code of the worker once it has ended; -n if signal n ended it."""
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, rank: int, command: Sequence[str], env: Mapping[str, str], cwd: str, stdin: int) -> Worker:
        """Start a worker as a child of this process. Raises LaunchError if the command cannot be run."""
        (out, printed), (err, complained) = _pipes()
        try:
            process = spawn(command, env, cwd, stdin, printed, complained)
        except LaunchError:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(printed)
            os.close(complained)
        worker = cls(rank, process.pid, out, err)
        worker._process = process
        return worker

    def read(self, stream: str) -> bytes | None:
        """Read from the stream "out" or "err". Returns b"" if nothing is available, and None at the end of the
        stream."""
        try:
            return os.read(self.pipes[stream].fileno(), CHUNK) or None
        except BlockingIOError:
            return b""

    def signal(self, number: int) -> None:
        """Send a signal to the worker's process group. Does nothing after the worker's end, as another process group
        may have the same number then."""
        try:
            if not self.ended:
                os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # all processes of the group have ended

    def end(self, status: int) -> None:
        """Record the worker's exit status, in the format of os.wait4."""
        self.ended = True
        self.returncode = os.waitstatus_to_exitcode(status)
        if self._process is not None:
            self._process.returncode = self.returncode


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Create the pipes of a worker's output. Raises LaunchError if no file descriptors are left."""
    first: tuple[int, int] | None = None
    try:
        first = os.pipe()
        return first, os.pipe()
    except OSError as error:
        for end in first or ():
            os.close(end)
        raise LaunchError(f"no pipe for the output of a worker ({error.strerror}); raise `ulimit -n`") from error
