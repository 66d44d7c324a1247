"""The shim between mpirun and a worker: `python -m dadt.launch.agent.shim`, which mpirun starts as a rank.

If the agent started the workers as its children, they would not be MPI ranks. Therefore the shim asks its host's agent
for the worker's command, runs it as its own child with all variables and descriptors that MPI gave to the shim, and
reports how it ended. The agent reads the worker's output, watches the worker and stops it like any other. The first
shim of a host starts the agent.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dadt.control import mpi_library, schema
from dadt.control.accept import connect_to
from dadt.control.connection import Reach, dial
from dadt.control.frame import Frame, Link
from dadt.control.job_folder import SOCKET, line_of, root
from dadt.errors import LaunchError
from dadt.launch.child import spawn, spawn_agent
from dadt.launch.ending.signals import Interrupts
from dadt.launch.start.standard_input import NoInput
from dadt.world import World

NOTE = "DADT_SHIM"
"""Environment variable with JSON {job, shares, reach, timeout}. It contains a key, which `ps` would show if it were
passed on the command line."""
MPI_VARIABLES = ("OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "MPI_", "MPIR_", "HYDRA_", "HYDI_", "I_MPI_")
"""Prefixes of the environment variables by which MPI libraries recognize their ranks."""
RETRY_SECONDS = 0.05


class Shim:
    """Runs one rank's worker as its own child, so that it belongs to the MPI job, and reports its end to the agent."""

    def __init__(self, world: World, note: Mapping[str, Any]) -> None:
        """Raises LaunchError if mpirun has placed this rank elsewhere than `dadt run` planned."""
        self._rank = world.rank
        self._reach = Reach.from_text(note["reach"])
        self._deadline = time.monotonic() + note["timeout"]
        self._parent = os.getppid()
        self._index, self._local_rank = _place(world, note["shares"])
        self._socket = line_of(root() / f"{note['job']}.{self._index}" / SOCKET, self._local_rank)
        known_by = (*MPI_VARIABLES, "SLURM_") if world.launcher == "srun" else MPI_VARIABLES
        self._own = {name: value for name, value in os.environ.items() if name.startswith(known_by)}
        self._agent: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run until the worker or the agent has ended. Raises LaunchError."""
        if self._local_rank == 0:
            self._start_agent()
        try:
            self._serve()
        except (BrokenPipeError, EOFError):
            pass  # the agent is gone: its guard kills the worker's children, and the kernel kills the worker

    def _serve(self) -> None:
        with Interrupts([signal.SIGCHLD]) as interrupts, self._connect() as line:
            link = Link(line.fileno(), line.fileno(), schema.ANSWERS)
            link.send(Frame("shim", {"rank": self._rank, "local_rank": self._local_rank, "pid": os.getpid()}))
            order = self._await_order(link)
            try:
                worker = self._start_worker(order)
            except LaunchError as error:
                link.send(Frame("unspawned", {"rank": self._rank, "message": str(error)[: schema.TEXT]}))
                return
            link.send(Frame("spawned", {"rank": self._rank, "pid": worker.pid}))
            self._watch(link, interrupts, worker)

    def _start_agent(self) -> None:
        """Start the agent, whose standard input is a connection to the launcher."""
        connection, _, _ = dial(lambda: self._reach, {"index": self._index}, self._deadline, listens=True)
        env = {name: value for name, value in os.environ.items() if name not in self._own}
        self._agent = spawn_agent(connection, sys.executable, env)

    def _connect(self) -> socket.socket:
        """Connect to the agent, which listens as soon as it has the order to start workers."""
        while time.monotonic() < self._deadline:
            with suppress(OSError):  # the agent does not listen yet, and no event reports when it does, so try again
                return connect_to(self._socket)
            if self._agent is not None and self._agent.poll() is not None:
                raise LaunchError(f"the agent of this host has ended with code {self._agent.returncode}")
            if os.getppid() != self._parent:
                raise LaunchError("what has started this rank has ended")
            time.sleep(RETRY_SECONDS)
        raise LaunchError(f"the agent of this host ({self._socket}) did not start in time")

    def _await_order(self, link: Link) -> Frame:
        with selectors.DefaultSelector() as selector:
            selector.register(link.reader, selectors.EVENT_READ)
            while (rest := self._deadline - time.monotonic()) > 0:
                if selector.select(rest) and (frames := link.receive()):
                    return frames[0]
        raise LaunchError("the agent of this host did not answer in time")

    def _start_worker(self, order: Frame) -> subprocess.Popen[bytes]:
        """Start the worker. The descriptors that MPI's daemon has left open for this rank stay open in it."""
        with Path(order["out"]).open("wb", buffering=0) as out, Path(order["err"]).open("wb", buffering=0) as err:
            env = {**order["env"], **self._own, **_libraries(order["env"])}
            env |= mpi_library.variables(env, self._socket.parent)
            # Stored as an attribute, so that this process's end of the pseudo-terminal stays open while the worker
            # runs.
            self._nothing = NoInput(order["terminal"])
            stdin = self._nothing.fileno()
            return spawn(order["command"], env, order["cwd"], stdin, out.fileno(), err.fileno(), close_fds=False)

    def _watch(self, link: Link, interrupts: Interrupts, worker: subprocess.Popen[bytes]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(link.reader, selectors.EVENT_READ)
            selector.register(interrupts, selectors.EVENT_READ)
            while True:
                link.receive()
                interrupts.take()
                if (ended := _wait_for(worker.pid)) is not None:
                    status, peak_memory = ended
                    worker.returncode = os.waitstatus_to_exitcode(status)
                    header = {"rank": self._rank, "status": status, "peak_memory": peak_memory}
                    link.send(Frame("ended", header))
                    return
                selector.select()


def _libraries(env: Mapping[str, str]) -> dict[str, str]:
    """Return LD_LIBRARY_PATH for a worker: the folders that mpirun has set on this host, followed by those in the
    worker's environment."""
    own, given = (each.get("LD_LIBRARY_PATH", "").split(":") for each in (os.environ, env))
    folders = dict.fromkeys(folder for folder in [*own, *given] if folder)
    return {"LD_LIBRARY_PATH": ":".join(folders)} if folders else {}


def _place(world: World, shares: list[int]) -> tuple[int, int]:
    """Return the index of this rank's host, and the rank's local rank on that host. Raises LaunchError."""
    if world.world_size != sum(shares):
        raise LaunchError(f"mpirun started {world.world_size} ranks, and not {sum(shares)} as it was told")
    index = next(i for i in range(len(shares)) if world.rank < sum(shares[: i + 1]))
    local_rank = world.rank - sum(shares[:index])
    if (world.local_rank, world.local_size) != (local_rank, shares[index]):
        raise LaunchError(
            f"mpirun has placed it as number {world.local_rank} of {world.local_size} on its host, and not as number "
            f"{local_rank} of {shares[index]}, host by host: does -H name one machine twice, or do variables or files "
            "of MPI choose another mapping?"
        )
    return index, local_rank


def _wait_for(pid: int) -> tuple[int, int] | None:
    """Return the exit status and peak memory in bytes of a child process; None while the process runs."""
    ended, status, usage = os.wait4(pid, os.WNOHANG)
    return (status, usage.ru_maxrss * 1024) if ended else None


def main() -> None:
    world = World.from_launcher()
    try:
        if NOTE not in os.environ or not world.launcher:
            raise LaunchError("only mpirun starts this, for `dadt run --launcher mpi`")
        Shim(world, json.loads(os.environ.pop(NOTE))).run()
    except LaunchError as error:
        sys.stderr.write(f"dadt: rank {world.rank} on {socket.gethostname()}: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
