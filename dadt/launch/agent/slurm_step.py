"""How an agent that is a task of a Slurm step gets to its launcher."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

from dadt.control.connection import Reach, become_standard, dial
from dadt.errors import LaunchError
from dadt.launch.hosts.slurm import forget_step

REACH = "DADT_REACH"
"""Tells an agent where its launcher is, and the key: on a command line, ps would show it."""
OVERHEARD = (signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's --signal goes to all processes of a step, and is meant for the workers."""
CONNECT_SECONDS = 30.0


def connect() -> None:
    """In the agent: its standard input and output become the way to its launcher. Raises LaunchError."""
    if REACH not in os.environ:
        raise LaunchError(f"--connect: {REACH} does not say where the launcher is; dadt run starts agents by itself")
    reach = Reach.from_text(os.environ.pop(REACH))
    if near := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        # Where Slurm has found srun from here, the launcher is.
        reach = replace(reach, addresses=[near, *reach.addresses])
    name = os.environ.get("SLURMD_NODENAME", "")
    forget_step(os.environ)
    for number in OVERHEARD:
        signal.signal(number, lambda number, frame: None)  # to ignore it would be inherited
    connection, _, _ = dial(lambda: reach, {"name": name}, time.monotonic() + CONNECT_SECONDS)
    become_standard(connection)
