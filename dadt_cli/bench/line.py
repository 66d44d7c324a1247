"""Messages and connections between the process that measures and the workers of `dadt bench MODEL`."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import AuthenticationError
from secrets import token_hex

from dadt.errors import DadtError
from dadt_cli.bench.folder import folder

KEY = "BENCH_KEY"
"""Environment variable with the secret by which workers authenticate to this benchmark. Its name does not begin with
DADT_, since such variables are settings."""
TRY_SECONDS = 5.0
"""Seconds to wait for an address to answer, and for a process that connects to authenticate itself."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message: what the worker trains and on which device."""

    rank: int
    threads: int
    device: str
    source: str
    parameters: int
    unit: str
    per_sample: int


@dataclass(frozen=True, slots=True)
class StepOrder:
    """An order to train: first `lead` uncounted steps, then `steps` counted ones."""

    lead: int
    steps: int


@dataclass(frozen=True, slots=True)
class Worked:
    """A worker's measurements of its counted steps: seconds, how many of these DADT's hooks took, processor seconds of
    the whole process, its peak memory in bytes, and processor seconds of its threads that move data between ranks (None
    without such threads)."""

    seconds: float
    own: float
    cpu: float
    memory: int
    transport: float | None = None


class Reception:
    """Socket to which workers connect. It has timeouts, so that an unknown process that connects cannot block the
    benchmark."""

    def __init__(self, listener: Listener, where: str, key: str) -> None:
        self._listener = listener
        self.where = where
        """The address that workers connect to."""
        self.key = key
        # Accepted connections inherit this timeout, so an unknown process that connects and sends nothing cannot block
        # the benchmark.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(TRY_SECONDS), 0))

    def accept(self, seconds: float) -> Connection | None:
        """Accept the next connection that authenticates with the benchmark's key. Returns None if none arrives within
        `seconds`, or its key is wrong."""
        self._socket.settimeout(seconds)
        try:
            connection = self._listener.accept()
        except (OSError, EOFError, AuthenticationError):
            return None
        with socket.socket(fileno=os.dup(connection.fileno())) as patient:
            patient.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return connection

    @property
    def _socket(self) -> socket.socket:
        inner: socket.socket = self._listener._listener._socket  # type: ignore[attr-defined]
        return inner


@contextmanager
def listen(remote: bool, ranks: int) -> Iterator[Reception]:
    """Listen for workers. Workers on this machine connect to a Unix socket, which they reach from any network
    namespace; if `remote`, workers connect to a port on any address of this machine."""
    key = token_hex(16)
    with folder() as place:
        if remote:
            from dadt.control.network import addresses

            listener = Listener(("0.0.0.0", 0), "AF_INET", backlog=ranks, authkey=key.encode())
            names = [entry["address"] for entry in addresses() if ":" not in entry["address"]]
            where = f"{','.join([*names, '127.0.0.1'])}:{listener.address[1]}"
        else:
            where = str(place / "s")
            listener = Listener(where, "AF_UNIX", backlog=ranks, authkey=key.encode())
        with listener:
            yield Reception(listener, where, key)


def connect(where: str) -> Connection:
    """Connect to a listener. where: a socket's path, or addresses separated by commas and a port, which are tried in
    turn. Raises DadtError if no address answers."""
    key = os.environ[KEY].encode()  # noqa: TID251 (a secret for this process, not a knob)
    if where.startswith("/"):
        return Client(where, "AF_UNIX", authkey=key)
    names, _, port = where.rpartition(":")
    for name in names.split(","):
        try:
            socket.create_connection((name, int(port)), TRY_SECONDS).close()
            return Client((name, int(port)), "AF_INET", authkey=key)
        except (OSError, EOFError, AuthenticationError):
            continue  # this address is unreachable, or another machine has it as well
    raise DadtError(f"{socket.gethostname()} reaches whoever measures at none of {names}, port {port}")
