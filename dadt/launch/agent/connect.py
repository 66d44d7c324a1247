"""Connects an agent that Slurm or Ray has started to its launcher."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace

from dadt.control.connection import Reach, SealedConnection, become_standard, dial
from dadt.errors import LaunchError
from dadt.launch.child import is_signalled_at_end
from dadt.launch.hosts.slurm import forget_step

REACH = "DADT_REACH"
"""Environment variable with the launcher's addresses and the job's key, which `ps` would show if it were passed on the
command line."""
NAME = "DADT_NODE"
"""Environment variable with the host's name, set for an agent that Ray starts."""
OVERHEARD = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm's option --signal sends to all processes of a job step, including this agent, although only the
workers need them."""
CONNECT_SECONDS = 30.0


def connect() -> None:
    """Connect to the launcher, and make the connection this agent's standard input. Raises LaunchError."""
    if REACH not in os.environ:
        raise LaunchError(f"--connect: {REACH} does not say where the launcher is; dadt run starts agents by itself")
    reach = Reach.from_text(os.environ.pop(REACH))
    if near := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        # Slurm tells each task an address of the host on which srun, and thus the launcher, runs. This address is tried
        # first.
        reach = replace(reach, addresses=[near, *reach.addresses])
    name, parent = os.environ.pop(NAME, ""), os.getppid()
    told = {"name": name or os.environ.get("SLURMD_NODENAME", "")}
    forget_step(os.environ)
    for number in OVERHEARD:
        # The handler does nothing. Ignoring the signal by SIG_IGN is not possible, because workers would inherit that.
        signal.signal(number, lambda number, frame: None)
    connection, _, _ = dial(lambda: reach, told, time.monotonic() + CONNECT_SECONDS, listens=True)
    if name:
        _end_with_actor(connection, parent)
    become_standard(connection)


def _end_with_actor(connection: SealedConnection, parent: int) -> None:
    """End the connection to the launcher when the parent process, which is Ray's actor, dies. Unlike Slurm, Ray does
    not end the processes that its actors start."""
    end = connection.socket.dup()

    def hang_up(*_: object) -> None:
        with suppress(OSError):  # the connection may have ended already
            end.shutdown(socket.SHUT_RDWR)

    signal.signal(signal.SIGUSR2, hang_up)
    if not is_signalled_at_end(parent, signal.SIGUSR2):
        raise LaunchError("the actor of Ray's that has started this agent has ended")
