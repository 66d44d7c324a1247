"""Entry point of an agent process: `python -m dadt.launch.agent` exchanges frames with the launcher over stdin and
stdout, or over a socket passed as stdin."""

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
        os.setsid()  # setsid() fails in a group leader, such as a Slurm task, which does not need it
    if "--connect" in sys.argv[1:]:
        from dadt.launch.agent.connect import connect

        try:
            connect()
        except LaunchError as error:
            sys.exit(f"dadt: {error}")
    # Frames are sent and received through other descriptors than 0 and 1, so that nothing that this process prints gets
    # between frames.
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
    gc.freeze()  # else garbage collection at exit would visit every imported object, which takes long


def _given(option: str) -> str:
    return next((word[len(option) :] for word in sys.argv if word.startswith(option)), "")


if __name__ == "__main__":
    main()
