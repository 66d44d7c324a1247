"""Control connections over a network: both ends, and the handshake in which each end proves that it knows the job's
key."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dadt.control import network, schema
from dadt.control.accept import Entrance
from dadt.control.priority import set_urgent
from dadt.control.seal import LENGTH, RECORD, TAG_BYTES, Seal
from dadt.errors import DadtError, LaunchError

GREETING = b"\0DADT2 launcher\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
TEXT_LIMIT = 1 << 20
STRANGERS = 100
"""Limit on the number of failed connection attempts that are reported to the user."""
SEAL = "DADT_SEAL"
"""Environment variable with the encryption state of the connection that an agent has as its standard input."""
MEET_SECONDS = 10.0
"""Seconds that the handshake may take."""
CONNECT_SECONDS = 3.0
PAUSES = (0.1, 1.0)
"""Seconds of the first and the longest pause between attempts to connect. No event reports when another host opens a
port or writes the file with its address."""
KEEPALIVE_PROBES = 3

Words = Mapping[str, Any]


class SealedConnection(NamedTuple):
    """An encrypted connection whose two ends have proved themselves to each other."""

    socket: socket.socket
    seal: Seal


class Refused(LaunchError):
    """Raised if the launcher has proved that it knows the key but refuses this process. The message is the one that the
    launcher sent."""


class Unreached(LaunchError):
    """Raised if no launcher with this key was reached."""

    nobody_listens = False
    """Whether every address answered that no process listens at the port."""
    another_key = False
    """Whether a launcher was reached that has another key."""


class _AnotherKey(ValueError):
    """Raised if the other side has shown that it does not know this side's key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Where a launcher listens, and the key that both sides share."""

    addresses: Sequence[str]
    port: int
    key: bytes
    silence: float
    """Seconds after which either side considers a silent connection broken."""

    def to_text(self) -> str:
        words = {"addresses": list(self.addresses), "port": self.port, "key": self.key.hex(), "silence": self.silence}
        return json.dumps(words)

    @classmethod
    def from_text(cls, text: str) -> Reach:
        """Parse the text that `to_text` returned. Raises ValueError if it is invalid."""
        try:
            words = json.loads(text)
            key, silence = bytes.fromhex(words["key"]), float(words["silence"])
            return cls(addresses=list(words["addresses"]), port=int(words["port"]), key=key, silence=silence)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no {error}") from error


class Listener:
    """Accepts connections in one thread and runs each handshake in another, so that a client that is silent or lacks
    the key does not delay others. Reads at most 64 bytes from a client before it has proved that it knows the key."""

    def __init__(
        self,
        key: bytes,
        silence: float,
        greet: Callable[[Words], Words],
        take: Callable[[Words, SealedConnection], None],
        port: int = 0,
        *,
        address: str = "",
        turned_away: Callable[[str], None] = lambda text: None,
    ) -> None:
        """greet: returns the answer to a client that knows the key; {"refused": sentence} rejects it. take: receives an
        accepted client's connection. address: where to listen; empty: on all addresses of this host. turned_away:
        receives a text about each failed attempt, once per address and reason. The three functions are called from
        several threads. Raises OSError if the port is in use.
        """
        self._key, self._silence = key, silence
        self._greet, self._take = greet, take
        self._turned_away = turned_away
        self._told: set[str] = set()
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family, dualstack_ipv6=both, backlog=1024)
        self.port = int(server.getsockname()[1])
        self._entrance = Entrance(server, _shut)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="dadt-listen", daemon=True)
        self._thread.start()

    def reach(self, wanted: str = "") -> Reach:
        """Return where clients can connect. wanted: the value of --network-interface."""
        found = [entry["address"] for entry in network.allowed(network.addresses(), wanted)]
        # The loopback address serves a host without network, where all agents are local.
        return Reach(addresses=[*found, network.SAME_MACHINE], port=self.port, key=self._key, silence=self._silence)

    def close(self) -> None:
        """Stop accepting connections, end the listening thread, and drop connections that are not authenticated. May be
        called repeatedly."""
        if not self._closed:
            self._closed = True
            _shut(self._entrance.server)  # shutting the socket down wakes the thread that waits in accept()
            self._thread.join()
            self._entrance.close()

    def forget(self) -> None:
        """Close the descriptor in a forked child, where the thread does not run."""
        self._entrance.server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._entrance.accept()
            except OSError:
                return  # the listening socket was closed, so the thread ends
            if connection is None:
                continue
            try:
                threading.Thread(target=self._meet, args=(connection,), name="dadt-meet", daemon=True).start()
            except RuntimeError:  # the system has no resources for another thread
                self._entrance.settle(connection)
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        taken = False
        try:
            met = self._hear(connection, time.monotonic() + MEET_SECONDS)
            self._entrance.settle(connection)
            if met is not None:
                guard(connection, self._silence)
                self._take(met[0], SealedConnection(connection, met[1]))
                taken = True
        except Exception as error:  # noqa: BLE001 (any error of a client's connection ends this connection only)
            self._tell(connection, error)
        finally:
            self._entrance.settle(connection)
            if not taken:
                connection.close()

    def _hear(self, connection: socket.socket, deadline: float) -> tuple[Words, Seal] | None:
        """Run the launcher's side of the handshake. Returns the client's `hello` message and the encryption state; None
        if `greet` refused the client."""
        ours = GREETING + secrets.token_bytes(NONCE_BYTES)
        _write(connection, ours, deadline)
        theirs = _read(connection, NONCE_BYTES, deadline)
        _check(_read(connection, PROOF_BYTES, deadline), _proof(self._key, b"agent", ours, theirs))
        self._entrance.settle(connection)
        _write(connection, _proof(self._key, b"launcher", ours, theirs), deadline)
        seal = Seal.between(self._key, ours + theirs, b"launcher", b"agent")
        hello = _read_words(connection, seal, deadline)
        answer = self._greet(hello)
        _write_words(connection, seal, answer, deadline)
        return None if "refused" in answer else (hello, seal)

    def _tell(self, connection: socket.socket, error: Exception) -> None:
        """Report a failed attempt to connect, once per address and reason, and STRANGERS times at most."""
        try:
            address = connection.getpeername()[0].removeprefix("::ffff:")
        except OSError:
            return  # the connection was dropped already, so its client's address is unknown
        text = f"a connection from {address} was turned away: {error or type(error).__name__}"
        if text not in self._told and len(self._told) < STRANGERS:
            self._told.add(text)
            self._turned_away(text)


def dial(
    find: Callable[[], Reach], hello: Words, deadline: float, whom: str = "the launcher", *, listens: bool = False
) -> tuple[SealedConnection, Words, str]:
    """Connect to the launcher, or to another listener. Returns the connection, the listener's answer to `hello`, and
    the address that worked. find: returns where the listener listens, or raises Unreached while this is unknown; called
    before each round of attempts. whom: what error messages call the listener. listens: whether it has listened since
    before this process was started, so that it has ended if nobody listens. Raises Refused, or Unreached: after the
    deadline, or as soon as the listener is known to have ended. The message says why the last round failed, and if a
    listener with another key was reached before, this as well: it may have given up meanwhile."""
    pause, longest = PAUSES
    earlier: Unreached | None = None
    while True:
        try:
            return attempt(find(), hello, deadline, whom)
        except Unreached as error:
            if time.monotonic() + pause >= deadline or (listens and error.nobody_listens):
                if earlier is None or error.another_key:
                    raise
                both = Unreached(f"{error}; before, {earlier}")
                both.nobody_listens = error.nobody_listens
                raise both from error
            if error.another_key:
                earlier = error
        time.sleep(pause)
        pause = min(2 * pause, longest)


def guard(connection: socket.socket, silence: float) -> None:
    """Have the kernel close the connection after `silence` seconds without a sign of the other host's kernel, and send
    its packets before bulk data. Only TCP keepalive is used, as TCP_USER_TIMEOUT would also end a connection whose
    reader is merely slow; silent processes are detected elsewhere.
    """
    connection.settimeout(None)
    set_urgent(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, int(silence / (KEEPALIVE_PROBES + 1)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def become_standard(connection: SealedConnection) -> None:
    """Make the connection this process's standard input, which is then used both to read and to write."""
    os.dup2(connection.socket.fileno(), 0)
    os.environ[SEAL] = connection.seal.to_text()
    connection.socket.close()


def handed_over() -> Seal | None:
    """Return the encryption state of the connection on standard input; None if standard input is a pipe or comes from
    SSH."""
    text = os.environ.pop(SEAL, "")
    return Seal.from_text(text) if text else None


def attempt(reach: Reach, hello: Words, deadline: float, whom: str) -> tuple[SealedConnection, Words, str]:
    """Try each of the listener's addresses once. Raises Refused, or Unreached if none works."""
    failures = []
    nobody_listens = True
    another_key = False
    for address in reach.addresses:
        where = f"[{address}]:{reach.port}" if ":" in address else f"{address}:{reach.port}"
        patience = min(CONNECT_SECONDS, max(0.1, deadline - time.monotonic()))
        try:
            connection = socket.create_connection((address, reach.port), patience)
        except OSError as error:
            failures.append(f"{where} ({error.strerror or error})")
            nobody_listens = nobody_listens and isinstance(error, ConnectionRefusedError)
            continue
        try:
            answer, seal = _introduce(connection, reach.key, hello, time.monotonic() + MEET_SECONDS, whom)
        except (OSError, EOFError, ValueError, DadtError) as error:
            connection.close()
            failures.append(f"{where} ({error})")
            nobody_listens = False
            another_key = another_key or isinstance(error, _AnotherKey)
            continue
        if "refused" in answer:
            connection.close()
            raise Refused(str(answer["refused"]))
        guard(connection, reach.silence)
        return SealedConnection(connection, seal), answer, where
    unreached = Unreached(f"{whom} was not reached at {', '.join(failures)}")
    unreached.nobody_listens = nobody_listens
    unreached.another_key = another_key
    raise unreached


def _introduce(connection: socket.socket, key: bytes, hello: Words, deadline: float, whom: str) -> tuple[Words, Seal]:
    ours = _read(connection, len(GREETING) + NONCE_BYTES, deadline)
    if not ours.startswith(GREETING):
        raise ValueError("not dadt listens there, or another version of it")
    theirs = secrets.token_bytes(NONCE_BYTES)
    _write(connection, theirs + _proof(key, b"agent", ours, theirs), deadline)
    try:
        proof = _read(connection, PROOF_BYTES, deadline)
    except (EOFError, ConnectionResetError) as error:
        raise _AnotherKey(f"{whom} there has another key") from error
    _check(proof, _proof(key, b"launcher", ours, theirs))
    seal = Seal.between(key, ours + theirs, b"agent", b"launcher")
    _write_words(connection, seal, hello, deadline)
    return _read_words(connection, seal, deadline), seal


def _proof(key: bytes, role: bytes, ours: bytes, theirs: bytes) -> bytes:
    """Return a proof of knowing the key, computed from both sides' random numbers. `role` differs between the sides, so
    that no side can send the other's proof back as its own."""
    return hmac.digest(key, b"dadt proof " + role + b"\0" + ours + theirs, "sha256")


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise _AnotherKey("it has another key")


def _write_words(connection: socket.socket, seal: Seal, words: Words, deadline: float) -> None:
    text = json.dumps(words).encode()
    _write(connection, seal.closed(LENGTH.pack(len(text)) + text), deadline)


def _read_words(connection: socket.socket, seal: Seal, deadline: float) -> Words:
    """Read a JSON object from an authenticated peer. Raises ValueError, or DadtError if the data was changed on its
    way."""
    said = bytearray()
    size = LENGTH.size
    while len(said) < size:
        length = _read(connection, LENGTH.size, deadline)
        (count,) = LENGTH.unpack(length)
        said += seal.opened(length + _read(connection, min(count, RECORD + TAG_BYTES), deadline))
        if len(said) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(said)[0]
        if size > TEXT_LIMIT:
            raise ValueError("it does not speak as dadt does")
    try:
        words = json.loads(said[LENGTH.size :])
    except RecursionError:
        words = None
    if not isinstance(words, dict) or not schema.anything(words):
        raise ValueError("it does not speak as dadt does")
    return words


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(_left(deadline))
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return bytes(data)


def _shut(connection: socket.socket) -> None:
    """Shut a connection down to wake the thread that waits on it; that thread then closes the connection."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer has closed the connection already


def _write(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(_left(deadline))
    connection.sendall(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it was too slow")
    return left
