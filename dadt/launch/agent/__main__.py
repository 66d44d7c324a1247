"""`python -m dadt.launch.agent`: frames on stdin and stdout, or on a connection that is its stdin."""

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
from dadt.launch.agent.agent import ENDING_SIGNALS, Agent
from dadt.launch.signals import Interrupts

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getpgid(0) != os.getpid():
        os.setsid()  # which the leader of a group, as a task of Slurm is, cannot and need not do
    if "--connect" in sys.argv[1:]:
        from dadt.launch.agent.slurm_step import connect

        try:
            connect()
        except LaunchError as error:
            sys.exit(f"dadt: {error}")
    # Frames keep descriptors of their own, so that nothing printed in this process can get between them.
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
        Agent(launcher, interrupts).run()
    gc.freeze()  # or the interpreter, on its way out, goes through all that was ever imported


if __name__ == "__main__":
    main()
