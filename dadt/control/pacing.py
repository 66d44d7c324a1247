"""Limits the sending rate of TCP connections by Linux's pacing of sockets, which needs no root and works on any network
device."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from dadt.errors import ConfigError

_SO_MAX_PACING_RATE = 47
_BYTES = struct.Struct("=Q")


def check(rate: float) -> None:
    """Raise ConfigError if this kernel cannot pace connections. rate: bytes per second to try."""
    with socket.socket() as connection:
        pace(connection, rate)


@contextmanager
def paced(rate: float) -> Iterator[None]:
    """Context manager that, at its end, limits each TCP connection that this process has made within it to `rate` bytes
    sent per second; 0: no limit. Raises ConfigError if the kernel cannot pace connections."""
    before = {_inode(connection) for connection in _connections()} if rate else set()
    yield
    for connection in _connections() if rate else ():
        if _inode(connection) not in before:
            pace(connection, rate)


def _connections() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets; each is closed when the next one is requested."""
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 (only the names are needed, as numbers)
        try:
            copy = os.dup(int(descriptor))
        except OSError:  # the descriptor was closed in the meantime
            continue
        try:
            connection = socket.socket(fileno=copy)
        except OSError:  # the descriptor is no socket
            os.close(copy)
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                yield connection


def _inode(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino


def pace(connection: socket.socket, rate: float) -> None:
    wanted = _BYTES.pack(max(1, round(rate)))
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, wanted)
        got = connection.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _BYTES.size)
    except OSError as error:
        why = error.strerror
    else:
        why = "" if got.ljust(_BYTES.size, b"\0") == wanted else "the speed did not stick"
    if why:
        raise ConfigError(
            f"--link paced: this kernel does not pace TCP connections ({why}) -> use Linux 5.0 or later, outside of a"
            " sandbox such as gVisor; as root, --link without paced: simulates hosts"
        )
