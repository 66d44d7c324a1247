"""Agents that connect back, where their launcher cannot reach them: both ends, and how each proves who it is."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dadt.errors import LaunchError
from dadt.launch import network
from dadt.launch.channel import Channel
from dadt.launch.frame import CHUNK, Link

GREETING = b"\0DADT1 launcher\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
TEXT_LIMIT = 1 << 20
LENGTH = struct.Struct(">I")
MEET_SECONDS = 10.0
"""How long one that connects may take to prove who it is."""
CONNECT_SECONDS = 3.0
PAUSES = (0.1, 1.0)
"""Between attempts, growing: nobody tells when a port is opened or a file written on another host."""
KEEPALIVE_PROBES = 3

Words = Mapping[str, Any]


class Refused(LaunchError):
    """The launcher is there, knows the key, and does not want us; the message is its sentence."""


class Unreached(LaunchError):
    """The launcher was not found, or what was found is not it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Where a launcher listens, and the key by which both sides know each other."""

    addresses: Sequence[str]
    port: int
    key: bytes
    silence: float
    """Seconds after which either side takes a silent connection for broken."""

    def to_text(self) -> str:
        words = {"addresses": list(self.addresses), "port": self.port, "key": self.key.hex(), "silence": self.silence}
        return json.dumps(words)

    @classmethod
    def from_text(cls, text: str) -> Reach:
        """Raises ValueError where it is none."""
        try:
            words = json.loads(text)
            key, silence = bytes.fromhex(words["key"]), float(words["silence"])
            return cls(addresses=list(words["addresses"]), port=int(words["port"]), key=key, silence=silence)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no {error}") from error


class Listener:
    """Accepts in a thread, and meets each one that connects in a thread of its own: who says nothing, or nothing
    sensible, or does not know the key, is dropped and disturbs nobody."""

    def __init__(
        self,
        key: bytes,
        silence: float,
        greet: Callable[[Words], Words],
        take: Callable[[Words, socket.socket], None],
        port: int = 0,
    ) -> None:
        """greet: answers one that has proven to know the key; {"refused": sentence} turns it away. take: gets the
        connection of one that was not. Both are called by several threads. Raises OSError if the port is taken."""
        self._key, self._silence = key, silence
        self._greet, self._take = greet, take
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="dadt-listen", daemon=True)
        self._thread.start()

    def reach(self, wanted: str = "") -> Reach:
        """For those who are to connect. wanted: as --network-interface says."""
        found = [entry["address"] for entry in network.allowed(network.addresses(), wanted)]
        # On a host without a network all agents are its own.
        return Reach(addresses=[*found, network.SAME_MACHINE], port=self.port, key=self._key, silence=self._silence)

    def close(self) -> None:
        """Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            return  # closed already
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue  # it has changed its mind
            except OSError:
                return  # closed
            threading.Thread(target=self._meet, args=(connection,), name="dadt-meet", daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        try:
            hello = self._hear(connection, time.monotonic() + MEET_SECONDS)
        except (OSError, EOFError, ValueError):
            connection.close()  # a stranger
            return
        if hello is None:
            connection.close()
        else:
            guard(connection, self._silence)
            self._take(hello, connection)

    def _hear(self, connection: socket.socket, deadline: float) -> Words | None:
        """What it says, once it has proven to know the key; None if it is not wanted."""
        ours = GREETING + secrets.token_bytes(NONCE_BYTES)
        _write(connection, ours, deadline)
        theirs = _read(connection, NONCE_BYTES, deadline)
        text = _read_text(connection, deadline)
        _check(_read(connection, PROOF_BYTES, deadline), _proof(self._key, b"agent", ours, theirs, text))
        hello = json.loads(text)
        if not isinstance(hello, dict):
            raise ValueError("it does not speak as dadt does")
        answer = self._greet(hello)
        reply = json.dumps(answer).encode()
        proof = _proof(self._key, b"launcher", ours, theirs, text, reply)
        _write(connection, LENGTH.pack(len(reply)) + reply + proof, deadline)
        return None if "refused" in answer else hello


class Arrivals:
    """The futures of agents that are to come, by name. Several threads may settle one; the first does."""

    def __init__(self, names: Iterable[str]) -> None:
        self.futures: dict[str, Future[Channel]] = {name: Future() for name in names}
        self._lock = threading.Lock()

    def admit(self, name: str, channel: Channel) -> None:
        """It is hung up where nobody waits for it any more."""
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
    """The launcher's end of an agent that has connected by itself."""

    def __init__(self, connection: socket.socket, explain: Callable[[float], str] = lambda seconds: "") -> None:
        """explain: why the agent is gone, where something comes to know that within so many seconds."""
        self._connection = connection
        self._explain = explain
        self._hung_up = False
        self._end: str | None = None
        self._writer = connection.dup()  # a selector takes a descriptor once, to read or to write
        self.link = Link(connection.fileno(), self._writer.fileno(), noisy=True)

    def hang_up(self) -> None:
        self._hung_up = True
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the agent was quicker

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
        """The agent closes its side when nothing of it is left."""
        try:
            while (rest := deadline - time.monotonic()) > 0:
                self._connection.settimeout(rest)
                if not self._connection.recv(CHUNK):
                    return True
        except TimeoutError:
            return False
        except OSError:
            return True  # reset: it is gone, too
        return False


def dial(find: Callable[[], Reach], hello: Words, deadline: float) -> tuple[socket.socket, Words, str]:
    """Connect to the launcher: the connection, its answer, and the address where it was.

    find: where it is; asked before each round of attempts, raises Unreached while that is not known. Raises Refused,
    or Unreached after the deadline.
    """
    pause, longest = PAUSES
    while True:
        try:
            return _attempt(find(), hello, deadline)
        except Unreached:
            if time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)


def guard(connection: socket.socket, silence: float) -> None:
    """Let the kernel break the connection once the other side has been silent for so many seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, int(silence / (KEEPALIVE_PROBES + 1)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))


def become_standard(connection: socket.socket) -> None:
    """From now on this process's standard input and output are the connection."""
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()


def _attempt(reach: Reach, hello: Words, deadline: float) -> tuple[socket.socket, Words, str]:
    """One round over all addresses."""
    failures = []
    for address in reach.addresses:
        where = f"[{address}]:{reach.port}" if ":" in address else f"{address}:{reach.port}"
        patience = min(CONNECT_SECONDS, max(0.1, deadline - time.monotonic()))
        try:
            connection = socket.create_connection((address, reach.port), patience)
        except OSError as error:
            failures.append(f"{where} ({error.strerror or error})")
            continue
        try:
            answer = _introduce(connection, reach.key, hello, time.monotonic() + MEET_SECONDS)
        except (OSError, EOFError, ValueError) as error:
            connection.close()
            failures.append(f"{where} ({error})")
            continue
        if "refused" in answer:
            connection.close()
            raise Refused(answer["refused"])
        guard(connection, reach.silence)
        return connection, answer, where
    raise Unreached(f"the launcher was not reached at {', '.join(failures)}")


def _introduce(connection: socket.socket, key: bytes, hello: Words, deadline: float) -> Words:
    ours = _read(connection, len(GREETING) + NONCE_BYTES, deadline)
    if not ours.startswith(GREETING):
        raise ValueError("not dadt listens there, or another version of it")
    text = json.dumps(hello).encode()
    theirs = secrets.token_bytes(NONCE_BYTES)
    proof = _proof(key, b"agent", ours, theirs, text)
    _write(connection, theirs + LENGTH.pack(len(text)) + text + proof, deadline)
    try:
        reply = _read_text(connection, deadline)
    except (EOFError, ConnectionResetError) as error:
        raise ValueError("the launcher there has another key") from error
    _check(_read(connection, PROOF_BYTES, deadline), _proof(key, b"launcher", ours, theirs, text, reply))
    answer: Words = json.loads(reply)
    return answer


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """Knows the key and all that was said; the role keeps one side's proof from being given back to it."""
    said = b"".join(LENGTH.pack(len(part)) + part for part in (role, *parts))
    return hmac.digest(key, said, "sha256")


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise ValueError("it has another key")


def _read_text(connection: socket.socket, deadline: float) -> bytes:
    (size,) = LENGTH.unpack(_read(connection, LENGTH.size, deadline))
    if size > TEXT_LIMIT:
        raise ValueError("it does not speak as dadt does")
    return _read(connection, size, deadline)


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(deadline))
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return bytes(data)


def _write(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(_left(deadline))
    connection.sendall(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it was too slow")
    return left
