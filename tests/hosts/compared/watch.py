"""Who has taken which step when: workers tell it over a socket in the file system, which all hosts share."""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Step:
    """A step that was taken."""

    time: float
    pid: int
    """As seen from here."""
    rank: int
    number: int
    digest: str
    """Of the last weights, at the end of a worker's training; else empty."""


class Watch:
    """Collects the steps of all workers."""

    def __init__(self, path: Path) -> None:
        self.steps: list[Step] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the kernel says who sends
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def pids(self) -> dict[int, int]:
        """The newest process of each rank."""
        return {step.rank: step.pid for step in list(self.steps)}

    def reached(self) -> int:
        return max((step.number for step in list(self.steps)), default=0)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        while True:
            data, ancillary, *_ = self._socket.recvmsg(256, socket.CMSG_SPACE(CREDENTIALS.size))
            if not data:
                return
            pid, _, _ = CREDENTIALS.unpack(ancillary[0][2])
            rank, number, *digest = data.decode().split()
            self.steps.append(Step(time.monotonic(), pid, int(rank), int(number), "".join(digest)))
