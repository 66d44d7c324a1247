"""`python -m dadt.launch.agent`, which speaks frames on stdin and stdout, or on a socket that is its stdin."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

from dadt.control import schema
from dadt.control.connection import handed_over
from dadt.control.frame import MAGIC, Link
from dadt.errors import LaunchError
from dadt.launch.agent.agent import Agent
from dadt.launch.ending.signals import ENDING_SIGNALS, Interrupts

PR_SET_CHILD_SUBREAPER = 36
STDIN, FOLDER = "--stdin=", "--folder="


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getpgid(0) != os.getpid():
        os.setsid()  # a group leader, such as a Slurm task, cannot call this and need not
    if "--connect" in sys.argv[1:]:
        from dadt.launch.agent.connect import connect

        try:
            connect()
        except LaunchError as error:
            sys.exit(f"dadt: {error}")
    # Frames use descriptors of their own, so that nothing printed in this process gets between them.
    seal = handed_over()
    reader, writer = os.dup(0), os.dup(1 if seal is None else 0)
    with open(os.devnull) as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with Interrupts([signal.SIGCHLD, *ENDING_SIGNALS]) as interrupts:
        launcher = Link(reader, writer, schema.LAUNCHER, seal=seal)
        launcher.post(MAGIC)
        launcher.flush()
        stdin = _given(STDIN)
        Agent(launcher, interrupts, int(stdin) if stdin else None, _given(FOLDER)).run()
    gc.freeze()  # otherwise the garbage collection at exit visits every object that was imported, which takes long


def _given(option: str) -> str:
    return next((word[len(option) :] for word in sys.argv if word.startswith(option)), "")


if __name__ == "__main__":
    main()
