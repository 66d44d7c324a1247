"""Decides how many TCP connections two ranks use for data: one for every 128 KiB of the link's bandwidth-delay product.
A connection that loses a packet halves its window and needs many round trips to recover, so a single one cannot fill a
long link."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from time import monotonic, sleep

MOST = 16
"""Largest number of data connections that two ranks make unless `--streams` gives a number."""
PROBES = 4
"""Number of connections with which a link is measured."""
_BYTES = 128 << 10
_NEAR = 2e-3
"""Round trip in seconds up to which a single connection fills any link."""
_ROUNDS = 24
"""Number of round trips after which a measurement ends at the latest."""
_CALM = 4
"""A measurement ends after this number of round trips without a higher rate. A rate is an average over as many round
trips, because after a lost packet all later data is acknowledged at once, a round trip late."""
_GROWTH = 1.1
_INFO = struct.Struct("=68xI48xQ20xI")
"""Fields of Linux's struct tcp_info: smoothed round trip in microseconds, bytes acknowledged, shortest round trip."""


def round_trip(connection: socket.socket) -> float:
    """Return the seconds of the shortest round trip that this connection has seen."""
    smoothed, _, shortest = _info(connection)
    return 1e-6 * min(smoothed, shortest)


def is_far(seconds: float) -> bool:
    """Whether a link of this round trip may need more than one connection."""
    return seconds > _NEAR


def count(rate: float, seconds: float) -> int:
    """Return how many connections suit a link. rate: bytes per second. seconds: duration of a round trip."""
    return max(1, min(MOST, ceil(rate * seconds / _BYTES)))


def measure(connections: Sequence[socket.socket], seconds: float) -> float:
    """Send on the connections until their total rate stops growing. Returns the highest rate, in bytes per second. The
    other side has to call `drain`, and the connections cannot be used for anything else. seconds: duration of a round
    trip."""
    data = bytes(1 << 18)
    for each in connections:
        each.setblocking(False)
    best = calm = 0.0
    seen = deque([_acknowledged(connections)], _CALM + 1)
    for _ in range(_ROUNDS):
        end = seen[-1][2] + seconds
        while monotonic() < end:
            for each in connections:
                with suppress(OSError):  # the buffer is full, or the other side has closed the connection
                    each.send(data)
            sleep(seconds / 16)
        seen.append(_acknowledged(connections))
        (before, begun, _), (after, _, now) = seen[0], seen[-1]
        rate = (after - before) / (now - begun)
        calm = 0 if rate > _GROWTH * best else calm + (best > 0)
        best = max(best, rate)
        if calm == _CALM:
            break
    return best


def drain(connection: socket.socket, silence: float) -> None:
    """Read what the other side sends by `measure`, until it closes the connection. silence: seconds without data after
    which this side gives up."""
    connection.settimeout(silence)
    memory = bytearray(1 << 18)
    with connection, suppress(OSError):
        while connection.recv_into(memory):
            pass


def drop(connection: socket.socket) -> None:
    """Close a connection at once, discarding data that was not sent yet."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _acknowledged(connections: Sequence[socket.socket]) -> tuple[int, float, float]:
    """Return the bytes acknowledged, and the times before and after they were counted: where this process had no
    processor in between, a rate from one time alone would be too high."""
    begun = monotonic()
    return sum(_info(each)[1] for each in connections), begun, monotonic()


def _info(connection: socket.socket) -> tuple[int, int, int]:
    smoothed, acknowledged, shortest = _INFO.unpack(
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    )
    return smoothed, acknowledged, shortest
