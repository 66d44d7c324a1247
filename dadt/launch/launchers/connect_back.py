"""Accepts agents that connect to the launcher, for launchers that cannot connect to their agents."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from dadt.control import schema
from dadt.control.connection import SealedConnection, Words
from dadt.control.frame import CHUNK, Link
from dadt.errors import LaunchError
from dadt.launch.channel import Channel


class Arrivals:
    """Futures of the agents that are expected to connect, by name. Several threads may settle a future; the first one
    wins."""

    def __init__(self, names: Iterable[str]) -> None:
        self.futures: dict[str, Future[Channel]] = {name: Future() for name in names}
        self._lock = threading.Lock()

    def greet(self, hello: Words) -> Words:
        """Return the answer to an agent that connects and names itself: a refusal, or empty if the agent is
        expected."""
        name = hello.get("name")
        if name not in self.futures:
            return {"refused": f"{name} is not among the hosts of this job"}
        return {"refused": f"{name} has an agent already"} if self.has(name) else {}

    def admit(self, name: str, channel: Channel) -> None:
        """Complete the future of the agent `name` with this channel. The channel is closed if nobody waits for the
        agent any more."""
        if not self._settle(name, lambda future: future.set_result(channel)):
            channel.end(0.0)

    def refuse(self, name: str, error: LaunchError) -> None:
        self._settle(name, lambda future: future.set_exception(error))

    def has(self, name: str) -> bool:
        return self.futures[name].done()

    def _settle(self, name: str, settle: Callable[[Future[Channel]], None]) -> bool:
        future = self.futures[name]
        with self._lock:
            if future.done() or not future.set_running_or_notify_cancel():
                return False
            settle(future)
        return True


class SocketChannel:
    """The launcher's end of a connection that an agent opened."""

    def __init__(self, connection: SealedConnection, explain: Callable[[float], str] = lambda seconds: "") -> None:
        """explain: returns why the agent is gone, if this becomes known within the passed number of seconds; else an
        empty string."""
        self._connection = connection.socket
        self._explain = explain
        self._hung_up = False
        self._end: str | None = None
        # a selector accepts each descriptor only once, so writing needs a second one
        self._writer = connection.socket.dup()
        ends = connection.socket.fileno(), self._writer.fileno()
        self.link = Link(*ends, schema.AGENT, noisy=True, seal=connection.seal)

    def hang_up(self) -> None:
        self._hung_up = True
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the agent has closed the connection already

    def end(self, timeout: float) -> str:
        if self._end is None:
            lost = not self._hung_up
            deadline = time.monotonic() + timeout
            self.hang_up()
            gone = self._await_end(deadline)
            self._connection.close()
            self._writer.close()
            self._end = self._explain(max(0.0, deadline - time.monotonic())) if lost or not gone else ""
        return self._end

    def _await_end(self, deadline: float) -> bool:
        """Wait until the agent closes its side of the connection, which is the last thing it does. Returns whether it
        did by `deadline`."""
        try:
            while (rest := deadline - time.monotonic()) > 0:
                self._connection.settimeout(rest)
                if not self._connection.recv(CHUNK):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True  # the connection was reset, so the agent is gone as well
        return False
