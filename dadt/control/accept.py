"""Accept connections from strangers. A flood neither ends the listener, nor fills memory, nor keeps others out."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

PEER = struct.Struct("3i")
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept() that pass: no descriptor or no memory is left."""
CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
FULL_SECONDS = 0.01
MOST_AT_ONCE = 64
"""Connections accepted in a row before the caller turns to its other work."""
MOST_UNPROVED = 64
"""Connections that may be open at once without having proved that they belong to the job."""


class Entrance:
    """A listening socket and its unproved connections. When there are too many, the oldest one of the address with
    the most is dropped, so a flood from one address does not push out the others. Thread-safe."""

    def __init__(self, server: socket.socket, drop: Callable[[socket.socket], None], most: int = MOST_UNPROVED) -> None:
        """drop: closes an unproved connection to make room."""
        self.server = server
        self._drop = drop
        self._most = most
        self._unproved: dict[socket.socket, str] = {}
        """Connection to the address it came from, oldest first."""
        self._lock = threading.Lock()
        self._spare: int | None = _spare()
        """A descriptor in reserve. When no other is left, it is closed so that a waiting connection can be dropped."""

    def accept(self) -> socket.socket | None:
        """The next connection, or None if there is none now. Raises OSError if the server is closed."""
        try:
            connection, address = self.server.accept()
        except OSError as error:
            if error.errno in CLOSED:
                raise
            if error.errno in FULL and not self._drop_one(0):
                self._turn_away()
            return None  # nobody waits, the client hung up, or its network failed
        with self._lock:
            self._unproved[connection] = str(address[0]) if isinstance(address, tuple) else ""
        self._drop_one(self._most)
        return connection

    def renew(self, server: socket.socket) -> None:
        """Listen with this socket from now on, as nobody reaches the one before."""
        self.server.close()
        self.server = server

    def settle(self, connection: socket.socket) -> None:
        """Stop counting a connection that has proved itself or is gone. Idempotent."""
        with self._lock:
            self._unproved.pop(connection, None)

    def close(self) -> None:
        """Close the server and drop all unproved connections. Idempotent."""
        self.server.close()
        while self._drop_one(0):
            pass
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _drop_one(self, most: int) -> bool:
        """Drop one connection if more than `most` are unproved. Returns whether it did."""
        with self._lock:
            if len(self._unproved) <= most:
                return False
            (crowded, _), *_ = Counter(self._unproved.values()).most_common(1)
            oldest = next(each for each, address in self._unproved.items() if address == crowded)
            del self._unproved[oldest]
        self._drop(oldest)
        return True

    def _turn_away(self) -> None:
        """Drop the connection that waits longest: it cannot be kept, and would wake the selector again and again."""
        if self._spare is not None:
            os.close(self._spare)
            try:
                self.server.accept()[0].close()
            except OSError:
                pass  # the client hung up, or another thread took the descriptor
        else:
            time.sleep(FULL_SECONDS)  # no event says that descriptors are free again
        self._spare = _spare()


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
