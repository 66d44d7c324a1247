"""Accepts connections from unknown clients. A flood of connections neither ends the listener, nor fills memory, nor
keeps real clients out."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PEER = struct.Struct("3i")
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Transient errors of accept(): no file descriptor or no memory is left."""
CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
FULL_SECONDS = 0.01
MOST_AT_ONCE = 64
"""Number of connections that are accepted in a row before the caller does other work."""
MOST_UNPROVED = 64
"""Limit on open connections whose clients have not yet proved that they belong to the job."""


class Entrance:
    """A listening socket and its unproved connections, whose clients have not proved yet that they belong to the job.
    If there are too many, the address with the most unproved connections loses its oldest one, so a flood from one
    address does not push out other clients. Thread-safe."""

    def __init__(self, server: socket.socket, drop: Callable[[socket.socket], None], most: int = MOST_UNPROVED) -> None:
        """drop: closes an unproved connection to make room. most: limit on unproved connections."""
        self.server = server
        self._drop = drop
        self._most = most
        self._unproved: dict[socket.socket, str] = {}
        """Maps each unproved connection to the address it came from, oldest first."""
        self._lock = threading.Lock()
        self._spare: int | None = _spare()
        """A spare file descriptor, closed when no other is left, so that a waiting connection can be accepted and
        dropped."""

    def accept(self) -> socket.socket | None:
        """Return the next connection, or None if there is none now. Raises OSError if the listening socket is
        closed."""
        try:
            connection, address = self.server.accept()
        except OSError as error:
            if error.errno in CLOSED:
                raise
            if error.errno in FULL and not self._drop_one(0):
                self._turn_away()
            return None  # no connection is waiting, the client hung up, or its network failed
        with self._lock:
            self._unproved[connection] = str(address[0]) if isinstance(address, tuple) else ""
        self._drop_one(self._most)
        return connection

    def renew(self, server: socket.socket) -> None:
        """Replace the listening socket, because clients no longer reach the previous one."""
        self.server.close()
        self.server = server

    def settle(self, connection: socket.socket) -> None:
        """Stop counting a connection as unproved, because its client has proved itself or the connection is closed. May
        be called repeatedly."""
        with self._lock:
            self._unproved.pop(connection, None)

    def close(self) -> None:
        """Close the listening socket and drop all unproved connections. May be called repeatedly."""
        self.server.close()
        while self._drop_one(0):
            pass
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _drop_one(self, most: int) -> bool:
        """Drop one connection if more than `most` are unproved. Returns whether one was dropped."""
        with self._lock:
            if len(self._unproved) <= most:
                return False
            (crowded, _), *_ = Counter(self._unproved.values()).most_common(1)
            oldest = next(each for each, address in self._unproved.items() if address == crowded)
            del self._unproved[oldest]
        self._drop(oldest)
        return True

    def _turn_away(self) -> None:
        """Accept and close the connection that has waited longest. No descriptor is free to use it with, and if it
        stayed in the queue it would wake the selector again and again."""
        if self._spare is not None:
            os.close(self._spare)
            try:
                self.server.accept()[0].close()
            except OSError:
                pass  # the client hung up, or another thread took the freed descriptor
        else:
            time.sleep(FULL_SECONDS)  # no event reports that descriptors are free again, so pause before retrying
        self._spare = _spare()


def listen_at(path: Path, backlog: int) -> socket.socket:
    """Return a non-blocking Unix socket that listens at a path. Raises OSError."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = path.with_name(f"{path.name}~")
    server.bind(str(bound))
    server.listen(backlog)
    server.setblocking(False)
    bound.rename(path)  # clients that find a socket that does not listen yet would be refused
    return server


def connect_to(path: Path, seconds: float | None = None) -> socket.socket:
    """Connect to the Unix socket at a path. seconds: timeout of the socket. Raises OSError if nobody listens there."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(seconds)
    try:
        line.connect(str(path))
    except OSError:
        line.close()
        raise
    return line


class PeerCredentials(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel reports it."""

    pid: int
    uid: int
    gid: int


def peer_of(line: socket.socket) -> PeerCredentials:
    return PeerCredentials(*PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)))


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
