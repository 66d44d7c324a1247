"""Accepting connections from whoever comes: a flood ends no listener, fills no memory and keeps nobody else out."""

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
"""No descriptor or no memory is left: for now."""
CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
FULL_SECONDS = 0.01
MOST_AT_ONCE = 64
"""Accepted before others get their turn."""
MOST_UNPROVED = 64
"""Connections at once that have not shown yet that they belong here."""


class Entrance:
    """A listening socket, and the connections that have not proved themselves. Of too many the oldest goes, of the
    address that has most: who comes from elsewhere is not pushed out. Thread-safe."""

    def __init__(self, server: socket.socket, drop: Callable[[socket.socket], None], most: int = MOST_UNPROVED) -> None:
        """drop: ends a connection that is not worth its place any more."""
        self.server = server
        self._drop = drop
        self._most = most
        self._unproved: dict[socket.socket, str] = {}
        """To the address it came from, oldest first."""
        self._lock = threading.Lock()
        self._spare: int | None = _spare()
        """Given up for a moment where no other descriptor is left, to take and drop who waits."""

    def accept(self) -> socket.socket | None:
        """The next connection; None where none can be had now. Raises OSError where the server is closed."""
        try:
            connection, address = self.server.accept()
        except OSError as error:
            if error.errno in CLOSED:
                raise
            if error.errno in FULL and not self._drop_one(0):
                self._turn_away()
            return None  # nobody is there, it has changed its mind, or its network has failed
        with self._lock:
            self._unproved[connection] = str(address[0]) if isinstance(address, tuple) else ""
        self._drop_one(self._most)
        return connection

    def settle(self, connection: socket.socket) -> None:
        """It has proved itself, or is gone. Idempotent."""
        with self._lock:
            self._unproved.pop(connection, None)

    def close(self) -> None:
        """Nothing is accepted any more, and who has not proved itself is dropped. Idempotent."""
        self.server.close()
        while self._drop_one(0):
            pass
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _drop_one(self, most: int) -> bool:
        """Where there are more than so many; whether there were."""
        with self._lock:
            if len(self._unproved) <= most:
                return False
            (crowded, _), *_ = Counter(self._unproved.values()).most_common(1)
            oldest = next(each for each, address in self._unproved.items() if address == crowded)
            del self._unproved[oldest]
        self._drop(oldest)
        return True

    def _turn_away(self) -> None:
        """Whoever waits longest: it would be seen again and again, and cannot be taken."""
        if self._spare is not None:
            os.close(self._spare)
            try:
                self.server.accept()[0].close()
            except OSError:
                pass  # it has gone, or another thread has taken the descriptor
        else:
            time.sleep(FULL_SECONDS)  # nobody tells when there are descriptors again
        self._spare = _spare()


class Peer(NamedTuple):
    """The other side of a Unix socket, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


def peer_of(line: socket.socket) -> Peer:
    return Peer(*PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)))


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
