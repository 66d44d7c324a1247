"""How many TCP connections two ranks have for data: one for every 128 KiB that the link between them holds, which is
its bandwidth times its round trip. Each connection that loses a packet halves what it has under way, and takes many
round trips to come back; so on a long link one alone cannot fill it."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from time import monotonic, sleep

MOST = 16
"""Most connections that are chosen."""
PROBES = 4
"""Connections that measure a link."""
_BYTES = 128 << 10
_NEAR = 2e-3
"""Seconds of a round trip up to which one connection fills any link."""
_ROUNDS = 24
"""Most round trips of a measurement."""
_CALM = 4
"""Round trips without a higher rate, after which it ends. A rate is of as many: where a packet is lost, what came after
it is acknowledged at once, a round trip late."""
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
    """Return how many connections suit a link. rate: bytes per second. seconds: of a round trip."""
    return max(1, min(MOST, ceil(rate * seconds / _BYTES)))


def measure(connections: Sequence[socket.socket], seconds: float) -> float:
    """Send over the connections until their rate grows no more. Returns the highest one, in bytes per second. The other
    side reads what comes (`drain`), and the connections are good for nothing else. seconds: of a round trip."""
    data = bytes(1 << 18)
    for each in connections:
        each.setblocking(False)
    best = calm = 0.0
    seen = deque([(_acknowledged(connections), monotonic())], _CALM + 1)
    for _ in range(_ROUNDS):
        end = seen[-1][1] + seconds
        while monotonic() < end:
            for each in connections:
                with suppress(OSError):  # it is full, or the other side has gone
                    each.send(data)
            sleep(seconds / 16)
        seen.append((_acknowledged(connections), monotonic()))
        (before, begun), (after, now) = seen[0], seen[-1]
        rate = (after - before) / (now - begun)
        calm = 0 if rate > _GROWTH * best else calm + (best > 0)
        best = max(best, rate)
        if calm == _CALM:
            break
    return best


def drain(connection: socket.socket, silence: float) -> None:
    """Read what `measure` sends on the other side, until that closes the connection. silence: seconds after which a
    silent connection is given up."""
    connection.settimeout(silence)
    memory = bytearray(1 << 18)
    with connection, suppress(OSError):
        while connection.recv_into(memory):
            pass


def drop(connection: socket.socket) -> None:
    """Close a connection without sending what waits in it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _acknowledged(connections: Sequence[socket.socket]) -> int:
    return sum(_info(each)[1] for each in connections)


def _info(connection: socket.socket) -> tuple[int, int, int]:
    smoothed, acknowledged, shortest = _INFO.unpack(
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    )
    return smoothed, acknowledged, shortest
