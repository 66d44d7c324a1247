"""Starts a child process that dies when its parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from dadt.errors import LaunchError

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

    Call it in the main thread of a single-threaded process: PR_SET_PDEATHSIG is bound to the thread that forks.
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
            preexec_fn=lambda: _die_with(parent),
        )
    except (OSError, ValueError) as error:
        raise LaunchError(f"{command[0]}: cannot be run ({_reason(error)})") from error


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Runs in the child between fork and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # the parent died before prctl took effect


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
