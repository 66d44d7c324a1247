"""TCP connections that send no faster than they are told: Linux paces each by itself, without root, on any device."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dadt.errors import ConfigError

_SO_MAX_PACING_RATE = 47
_BYTES = struct.Struct("=Q")
_DESCRIPTORS = Path("/proc/self/fd")


def check(rate: float) -> None:
    """Raises ConfigError where this kernel does not pace connections."""
    with socket.socket() as connection:
        _pace(connection, rate)


@contextmanager
def paced(rate: float) -> Iterator[None]:
    """The connections that this process makes meanwhile send so many bytes per second at most; 0: as many as they can.
    Raises ConfigError as `check`."""
    before = _sockets() if rate else ()
    yield
    if rate:
        _pace_others(rate, before)


def _pace_others(rate: float, spared: Collection[int]) -> None:
    for descriptor in _DESCRIPTORS.iterdir():
        try:
            connection = socket.socket(fileno=os.dup(int(descriptor.name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with connection:
            is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and os.fstat(connection.fileno()).st_ino not in spared:
                _pace(connection, rate)


def _sockets() -> set[int]:
    """Inodes of this process's sockets."""
    found = set()
    for descriptor in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # it was closed meanwhile
            if descriptor.is_socket():
                found.add(descriptor.stat().st_ino)
    return found


def _pace(connection: socket.socket, rate: float) -> None:
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
