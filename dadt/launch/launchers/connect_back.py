"""Agents that connect to the launcher by themselves."""

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
    """The futures of expected agents, by name. Several threads may settle a future; the first one wins."""

    def __init__(self, names: Iterable[str]) -> None:
        self.futures: dict[str, Future[Channel]] = {name: Future() for name in names}
        self._lock = threading.Lock()

    def greet(self, hello: Words) -> Words:
        """The answer to an agent that says its name."""
        name = hello.get("name")
        if name not in self.futures:
            return {"refused": f"{name} is not among the hosts of this job"}
        return {"refused": f"{name} has an agent already"} if self.has(name) else {}

    def admit(self, name: str, channel: Channel) -> None:
        """Settle the future with a channel, which is closed if nobody waits for it any more."""
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
    """The launcher's end of the connection to an agent that connected by itself."""

    def __init__(self, connection: SealedConnection, explain: Callable[[float], str] = lambda seconds: "") -> None:
        """explain: returns why the agent is gone, if that becomes known within the given seconds."""
        self._connection = connection.socket
        self._explain = explain
        self._hung_up = False
        self._end: str | None = None
        self._writer = connection.socket.dup()  # a selector takes each descriptor only once
        ends = connection.socket.fileno(), self._writer.fileno()
        self.link = Link(*ends, schema.AGENT, noisy=True, seal=connection.seal)

    def hang_up(self) -> None:
        self._hung_up = True
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the agent closed first

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
        """Wait for the agent to close its side, which it does last. Returns whether it did."""
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
