"""The connection of an agent that is a task of a Slurm step to its launcher."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

from dadt.control.connection import Reach, become_standard, dial
from dadt.errors import LaunchError
from dadt.launch.hosts.slurm import forget_step

REACH = "DADT_REACH"
"""The variable with the launcher's addresses and the key, which ps would show on a command line."""
OVERHEARD = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm's --signal sends to all processes of a step, though they are meant for the workers."""
CONNECT_SECONDS = 30.0


def connect() -> None:
    """Make a connection to the launcher this agent's standard input. Raises LaunchError."""
    if REACH not in os.environ:
        raise LaunchError(f"--connect: {REACH} does not say where the launcher is; dadt run starts agents by itself")
    reach = Reach.from_text(os.environ.pop(REACH))
    if near := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        # The launcher is where srun was started, and Slurm knows an address of that host.
        reach = replace(reach, addresses=[near, *reach.addresses])
    name = os.environ.get("SLURMD_NODENAME", "")
    forget_step(os.environ)
    for number in OVERHEARD:
        signal.signal(number, lambda number, frame: None)  # workers would inherit SIG_IGN
    connection, _, _ = dial(lambda: reach, {"name": name}, time.monotonic() + CONNECT_SECONDS)
    become_standard(connection)
