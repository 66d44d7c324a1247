"""The port at which a launcher awaits its agents, where others start these: Slurm, or people on each host.

DADT's own `Entrance` accepts who calls, and its `ConnectBackLauncher` says who is expected.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dadt.control.accept import MOST_UNPROVED, Entrance
from dadt.control.connection import MEET_SECONDS, PAUSES
from dadt.launch.channel import AgentRequest
from dadt.launch.launchers.connect_back import ConnectBackLauncher
from simulation.world import Broken, Process, World

if TYPE_CHECKING:
    from dadt.config import Config
    from dadt.launch.hosts.host import Host

BACKLOG = 1024
SRUN = "srun ended the agent, because another node's had failed, or the job was cancelled"
"""What the launcher says of an agent that Slurm has ended (SlurmStep.why)."""
STEPS = 3
"""Messages of a handshake, one after the other."""


class Caller:
    """One connection to the port."""

    def __init__(self, address: str, latency: float, name: str, let_in: Callable[[], None], again: Callable[[], None]):
        """name: under which it introduces itself; empty for one that does not know the job's key. let_in, again: called
        once it is expected, or once the launcher has closed it."""
        self.address, self.latency, self.name = address, latency, name
        self.let_in, self.again = let_in, again
        self.open = True

    def close(self) -> None:
        """The launcher closes it."""
        if self.open:
            self.open = False
            self.again()


class NoChannel:
    """Stands for the connection with an agent, which the world carries."""

    def end(self, timeout: float) -> str:
        raise Broken("an agent that is expected is sent away")


class Door:
    """The listening socket, and what the launcher's threads do with those who call (dadt/control/connection.py)."""

    def __init__(self, world: World, process: Process, config: Config, hosts: Sequence[Host]) -> None:
        self._world, self._process = world, process
        self._arrivals = ConnectBackLauncher(AgentRequest(config, hosts, (), "job"), [host.name for host in hosts])
        self._waiting: deque[Caller] = deque()
        self._unproved: set[Caller] = set()
        self._looks = self._closed = False
        self.full = False
        """Whether the launcher has no descriptors left."""
        self._entrance = Entrance(self, Caller.close)  # type: ignore[arg-type]

    # As a socket ---------------------------------------------------------------------------------------------------

    def accept(self) -> tuple[Caller, tuple[str, int]]:
        if not self._waiting:
            raise BlockingIOError(errno.EAGAIN, "nobody has called")
        if self.full and not self._has_closed_spare:
            raise OSError(errno.EMFILE, "too many open files")
        caller = self._waiting.popleft()
        return caller, (caller.address, 0)

    @property
    def _has_closed_spare(self) -> bool:
        """Whether a descriptor is free, since `Entrance` has closed the one that it holds for this."""
        try:
            os.fstat(self._entrance._spare if self._entrance._spare is not None else -1)
        except OSError:
            return self._entrance._spare is not None
        return False

    def expect(self, name: str) -> None:
        """Another agent of this name is to come (RayLauncher._launch)."""
        self._arrivals._arrivals[name] = Future()

    def close(self) -> None:
        """The launcher listens no more."""
        if not self._closed:
            self._closed = True
            self._entrance.close()
            for caller in self._waiting:
                caller.open = False

    # Who calls -----------------------------------------------------------------------------------------------------

    def call(self, caller: Caller) -> None:
        if self._closed or len(self._waiting) >= BACKLOG:
            caller.close()
            return
        self._waiting.append(caller)
        if not self._looks:
            self._looks = True
            self._world.after(caller.latency, lambda: self._process.get(self._look))

    def _look(self) -> None:
        """What Listener._accept does."""
        self._looks = False
        vain = 0
        while self._waiting and not self._closed:
            before = len(self._waiting)
            connection: Any = self._entrance.accept()
            vain = vain + 1 if len(self._waiting) == before else 0
            if vain > MOST_UNPROVED:
                raise Broken("the launcher spins at the port where it awaits its agents")
            if connection is not None:
                self._unproved.add(connection)
                self._meet(connection)
            if sum(caller.open for caller in self._unproved) > MOST_UNPROVED:
                raise Broken(f"more than {MOST_UNPROVED} that have proved nothing are connected")

    def _meet(self, caller: Caller) -> None:
        """What Listener._meet does, in a thread for each."""
        seconds = STEPS * caller.latency if caller.name else self._world.random.choice([caller.latency, MEET_SECONDS])
        self._world.after(seconds, lambda: self._process.get(lambda: self._met(caller)))

    def _met(self, caller: Caller) -> None:
        self._entrance.settle(caller)  # type: ignore[arg-type]
        self._unproved.discard(caller)
        if not caller.open or self._closed:
            return
        arrivals = self._arrivals
        if not caller.name or "refused" in arrivals._greet({"name": caller.name}):
            caller.close()
            return
        arrivals._admit(caller.name, NoChannel())  # type: ignore[arg-type]
        caller.let_in()


class Dialer:
    """An agent that calls until it is let in (`connection.dial`)."""

    def __init__(self, world: World, door: Door, address: str, latency: float, name: str, seconds: float) -> None:
        """seconds: how long it tries."""
        self._world, self._door = world, door
        self._address, self._latency, self._name = address, latency, name
        self._until = world.now + seconds
        self._pause, self._longest = PAUSES

    def call(self, let_in: Callable[[], None]) -> None:
        self._door.call(Caller(self._address, self._latency, self._name, let_in, lambda: self._again(let_in)))

    def _again(self, let_in: Callable[[], None]) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        if self._world.now + pause < self._until:
            self._world.after(pause, lambda: self.call(let_in))
