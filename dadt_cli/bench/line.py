"""The messages between a measuring process and a worker of `dadt bench MODEL`, and their connection."""

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
"""The variable in which workers are given what proves that they are ours; those that begin with DADT_ are knobs."""
TRY_SECONDS = 5.0
"""Seconds for an address to answer, and for whoever connects to prove who it is."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message."""

    rank: int
    threads: int
    device: str
    source: str
    parameters: int
    unit: str
    per_sample: int


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Steps to take: first those that are not counted."""

    lead: int
    steps: int


@dataclass(frozen=True, slots=True)
class Worked:
    """Seconds of the counted steps, those of them in DADT's hooks, the processor's (of all threads of the process), and
    the most bytes in use so far."""

    seconds: float
    own: float
    cpu: float
    memory: int


class Reception:
    """The end at which workers connect. Every wait of its own is short, whoever else connects."""

    def __init__(self, listener: Listener, where: str, key: str) -> None:
        self._listener = listener
        self.where = where
        """The address that workers connect to."""
        self.key = key
        # Inherited by what is accepted: a stranger who connects and says nothing is not waited for.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(TRY_SECONDS), 0))

    def accept(self, seconds: float) -> Connection | None:
        """Accept the next who has our key; None if nobody has come within `seconds`, or it was somebody else."""
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
    """Listen for workers: for those of this machine on a socket in a folder, which leads there from whatever network
    they are in; else on every address of this machine."""
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
    """Connect to a listener. where: a path, or addresses separated by commas and a port, which are tried in turn.
    Raises DadtError."""
    key = os.environ[KEY].encode()  # noqa: TID251 (a secret for this process, not a knob)
    if where.startswith("/"):
        return Client(where, "AF_UNIX", authkey=key)
    names, _, port = where.rpartition(":")
    for name in names.split(","):
        try:
            socket.create_connection((name, int(port)), TRY_SECONDS).close()
            return Client((name, int(port)), "AF_INET", authkey=key)
        except (OSError, EOFError, AuthenticationError):
            continue  # another machine's address that this one uses, too, or no way there
    raise DadtError(f"{socket.gethostname()} reaches whoever measures at none of {names}, port {port}")
