"""Starts and ends child processes: workers, agents and the programs that start agents."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from dadt.control.connection import SEAL, SealedConnection
from dadt.errors import LaunchError

AGENT = ("-u", "-m", "dadt.launch.agent")
"""Arguments with which Python starts an agent."""

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    stdin: int,
    out: int,
    err: int,
    *,
    close_fds: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a worker's process. Raises LaunchError if the command cannot be run.

    Call it in the main thread of a single-threaded process, since the kernel ends the child when the thread that has
    started it ends.
    """
    parent = os.getpid()
    try:
        return subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=out,
            stderr=err,
            close_fds=close_fds,
            start_new_session=True,
            preexec_fn=lambda: end_with(parent),
        )
    except (OSError, ValueError) as error:
        raise LaunchError(f"{command[0]}: cannot be run ({getattr(error, 'strerror', None) or error})") from error


def spawn_agent(
    connection: SealedConnection, python: str, env: Mapping[str, str], before: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """Start an agent that uses this connection to its launcher as standard input, and close this process's copy of the
    connection. before: called in the child before it becomes the agent. Raises OSError."""
    with connection.socket:
        return subprocess.Popen(
            [python, *AGENT],
            stdin=connection.socket.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**env, SEAL: connection.seal.to_text()},
            cwd="/",  # `python -m` first looks in the current folder, where a module may be named like DADT's
            preexec_fn=before,
        )


def end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process to end, and kill it after `seconds` seconds. Returns whether it ended by itself."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def without_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return these environment variables without the settings of DADT."""
    return {name: value for name, value in env.items() if not name.startswith("DADT_")}


def is_signalled_at_end(parent: int, number: int) -> bool:
    """Have the kernel send this process a signal when its parent ends. Returns whether the parent still runs."""
    _libc.prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel end this process by a signal when its parent ends. May run between fork and exec."""
    if not is_signalled_at_end(parent, number):
        os._exit(128 + number)  # the parent has died before prctl took effect
