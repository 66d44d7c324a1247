"""Accepts connections of agents, for launchers that cannot connect to their agents themselves."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from dadt.control import schema
from dadt.control.connection import Listener, Reach, SealedConnection, Words
from dadt.control.frame import CHUNK, Link
from dadt.errors import LaunchError
from dadt.launch.channel import AgentRequest, Channel

END_SECONDS = 5.0
"""Seconds that a program which has started agents may take to end after the agents, and again after SIGTERM."""


class ConnectBackLauncher:
    """A launcher whose agents connect to it. In subclasses, other programs start the agents."""

    extends = False

    def __init__(self, request: AgentRequest, names: Iterable[str] = ()) -> None:
        """names: the names by which the agents identify themselves when they connect."""
        self._request, self._config = request, request.config
        self._arrivals: dict[str, Future[Channel]] = {name: Future() for name in names}
        """For each agent that is expected to connect, by its name: the future that its connection completes."""
        self._settling = threading.Lock()
        """Lock that a thread holds while it completes a future. Several threads may try to, and the first one
        succeeds."""
        self._listener: Listener | None = None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _listen(self, key: bytes = b"", port: int = 0) -> Reach:
        """Begin to listen, and return where agents can connect. key: the key that agents know; if empty, a random one
        is made. Raises OSError if the port is in use."""
        silence, turned_away = self._config.orphan_timeout, self._request.turned_away
        key = key or secrets.token_bytes(32)
        self._listener = Listener(key, silence, self._greet, self._take, port, turned_away=turned_away)
        return self._listener.reach(self._config.network_interface)

    def _greet(self, hello: Words) -> Words:
        """Return the answer to an agent that connects, which is a refusal, or empty if the agent is expected."""
        name = hello.get("name")
        if name not in self._arrivals:
            return {"refused": f"{name} is not among the hosts of this job"}
        return {"refused": f"{name} has an agent already"} if self._arrivals[name].done() else {}

    def _take(self, hello: Words, connection: SealedConnection) -> None:
        """Accept the connection of an agent that `_greet` has not refused."""
        self._admit(hello["name"], SocketChannel(connection))

    def _admit(self, name: str, channel: Channel) -> None:
        """Complete the future of the agent `name` with this channel. If nobody waits for the agent any more, the
        channel is closed."""
        if not self._settle(name, lambda future: future.set_result(channel)):
            channel.end(0.0)

    def _refuse(self, name: str, why: str) -> None:
        """Let the future of an agent fail for reason `why`, unless the agent has connected."""
        self._settle(name, lambda future: future.set_exception(LaunchError(why)))

    def _settle(self, name: str, settle: Callable[[Future[Channel]], None]) -> bool:
        future = self._arrivals[name]
        with self._settling:
            if future.done() or not future.set_running_or_notify_cancel():
                return False
            settle(future)
        return True

    @property
    def _missing(self) -> list[str]:
        """Names of the agents that have not connected."""
        return [name for name, future in self._arrivals.items() if not future.done()]


class StartingProgram:
    """A running program, such as srun, that starts all agents of a job and whose output explains their failures."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], ended: Callable[[], None]) -> None:
        """ended: called in another thread when the program has ended. Raises OSError if the program cannot be run."""
        self.closing = threading.Event()
        self._ended = ended
        self._news = threading.Condition()
        """Condition that is held while the program's output is handled, and notified after each line and at the end."""
        self._over = False
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to `dadt run` only, which then ends the job
            cwd="/",
            text=True,
            errors="replace",
        )
        self._thread = threading.Thread(target=self._read, name="dadt-starter", daemon=True)

    def listen(self) -> None:
        """Begin to read the program's output. Since the program may end at once, call this only when `ended` may be
        called."""
        self._thread.start()

    def close(self, at_once: bool) -> None:
        """Wait until the program has ended, and end it if it takes too long. at_once: do not wait for it to end by
        itself. Idempotent."""
        self.closing.set()
        for patience, number in ((0.0 if at_once else END_SECONDS, signal.SIGTERM), (END_SECONDS, signal.SIGKILL)):
            try:
                self._process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)  # SIGTERM makes srun kill the whole step
        self._thread.join(END_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._news:
                    self._hear(line.rstrip())
                    self._news.notify_all()
        self._process.wait()
        with self._news:
            self._over = True
            self._news.notify_all()
        self._ended()

    def _hear(self, line: str) -> None:
        """Handle a line of the program's output."""
        raise NotImplementedError


class SocketChannel:
    """The launcher's end of a connection that an agent opened."""

    def __init__(self, connection: SealedConnection, explain: Callable[[float], str] = lambda seconds: "") -> None:
        """explain: called with a number of seconds; returns why the agent is gone if this becomes known within this
        time, else an empty string."""
        self._connection = connection.socket
        self._explain = explain
        self._hung_up = False
        self._end: str | None = None
        # A selector accepts each descriptor only once, so another descriptor is needed for writing.
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
        """Wait until the agent closes its side of the connection, which it does at its very end. Returns whether this
        happened by `deadline`."""
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
