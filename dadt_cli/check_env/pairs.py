"""Measures round trips and speed between any two hosts, by a process on each host.

In each round, a host is paired with at most one other, as in a tournament, so that measurements do not disturb each
other. A pair begins when both hosts have reached its round; the first to arrive waits, at most until the round ends.
"""

from __future__ import annotations

import errno
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

TOKEN_BYTES = 16
HELLO = struct.Struct(f"!{TOKEN_BYTES}sII")
"""The first bytes that the calling host sends on a connection: the job's token, its own index, and the kind of
measurement (ECHO, UP or DOWN)."""
ECHO, UP, DOWN = range(3)
WELCOME = b"!"
STREAMS = 4
"""Number of connections that carry data at the same time, since a single connection does not fill a fast link."""
TRIPS, FEW_TRIPS, TRIPS_SECONDS = 200, 4, 0.5
SPEED_SECONDS, WARM_SECONDS = 1.0, 0.3
"""Seconds to measure the speed in each direction, and how many of these seconds do not count, because TCP starts
slowly."""
BLOCK = 1 << 20
START_SECONDS = 10.0
"""Seconds within which the processes of all hosts must listen."""
ROUND_SECONDS = 3.0
AGAIN_SECONDS = 0.02
BACKLOG = 256
STRANGER_SECONDS = 1.0
"""Seconds within which a process that connects must send the job's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """An order to the measuring process of one host. addresses: [address, port] of each host."""

    index: int
    addresses: Sequence[Sequence[Any]]
    token: str
    speed: bool

    @property
    def seconds(self) -> float:
        """Seconds after which the measurement has ended, even if hosts hang."""
        return START_SECONDS + len(rounds(len(self.addresses))) * self.round_seconds

    @property
    def round_seconds(self) -> float:
        return ROUND_SECONDS + (2 * SPEED_SECONDS + ROUND_SECONDS if self.speed else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPair:
    """Measurements from one host to another, which are given by their indices. A value that was not measured is None,
    and `error` contains the reason."""

    source: int
    target: int
    seconds: float | None = None
    """Median seconds of a round trip between the two hosts."""
    jitter: float | None = None
    """Seconds by which the 90th percentile of the round trips exceeds the median."""
    speed: float | None = None
    """Measured bytes per second from the source host to the target host."""
    error: str = ""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which any two of `count` hosts meet once (the circle method). The lower index comes
    first in each pair."""
    size = count + count % 2
    order = list(range(size))
    found = []
    for _ in range(size - 1):
        pairs = [(order[i], order[size - 1 - i]) for i in range(size // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        order = [order[0], order[-1], *order[1:-1]]
    return found


def measure(order: PairOrder) -> list[HostPair]:
    """Measure the connections between this host and all others. A network error becomes a result, and is never
    raised."""
    address, port = order.addresses[order.index]
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        others = (other for other in range(len(order.addresses)) if other != order.index)
        text = f"{address} port {port}: {error.strerror}"
        return [HostPair(source=order.index, target=other, error=text) for other in others]
    with server:
        host = _Host(order, server)
        try:
            return list(host.ways())
        finally:
            host.close()


class _Host:
    def __init__(self, order: PairOrder, server: socket.socket) -> None:
        self._order = order
        self._token = bytes.fromhex(order.token)
        self._server = server
        self._started = self._deadline = time.monotonic() + START_SECONDS
        self._early: dict[tuple[int, int], list[socket.socket]] = {}
        """Connections that arrived before the round of their pair, by calling host and kind of measurement."""

    def close(self) -> None:
        for connections in self._early.values():
            for connection in connections:
                connection.close()

    def ways(self) -> Iterator[HostPair]:
        for pairs in rounds(len(self._order.addresses)):
            self._deadline += self._order.round_seconds
            for low, high in pairs:
                if self._order.index in (low, high):
                    yield from self._pair(low, high)

    def _pair(self, low: int, high: int) -> Iterator[HostPair]:
        """Measure one pair of hosts. The host with the lower index calls and measures round trips; the host that
        receives data measures the speed."""
        mine = self._order.index
        other = low if mine == high else high
        try:
            if mine == low:
                with self._call(high, ECHO) as line:
                    seconds, jitter = _trips(line)
                yield HostPair(source=low, target=high, seconds=seconds, jitter=jitter)
            else:
                with self._answer(low, ECHO) as line:
                    _echo(line)
            if self._order.speed:
                for kind in (UP, DOWN):
                    if (speed := self._flow(other, kind, calls=mine == low)) is not None:
                        yield HostPair(source=other, target=mine, speed=speed)
        except OSError as error:
            text = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            yield HostPair(source=mine, target=other, error=text)

    def _flow(self, other: int, kind: int, *, calls: bool) -> float | None:
        """Send or receive data at full speed: with UP, the calling host sends, with DOWN, the answering host. Returns
        bytes per second on the host that receives, None on the host that sends."""
        with ExitStack() as stack:
            lines = [
                stack.enter_context(self._call(other, kind) if calls else self._answer(other, kind))
                for _ in range(STREAMS)
            ]
            if calls == (kind == UP):
                _send(lines)
                return None
            return _receive(lines)

    def _call(self, other: int, kind: int) -> socket.socket:
        """Connect to the other host, trying again until the host listens. Raises OSError."""
        address, port = self._order.addresses[other]
        while True:
            try:
                line = socket.create_connection((address, port), timeout=min(self._left(), ROUND_SECONDS))
                break
            except ConnectionRefusedError:
                if time.monotonic() > self._started:
                    raise
                time.sleep(AGAIN_SECONDS)
        try:
            line.sendall(HELLO.pack(self._token, self._order.index, kind))
            line.settimeout(self._left())  # the other host may still be measuring with a third host
            _exactly(line, len(WELCOME))
            _prepare(line)
        except OSError:
            line.close()
            raise
        return line

    def _answer(self, other: int, kind: int) -> socket.socket:
        """Return the next connection of the other host for this kind of measurement. Raises OSError."""
        while not (waiting := self._early.get((other, kind), [])):
            self._server.settimeout(self._left())
            line, _ = self._server.accept()
            try:
                line.settimeout(STRANGER_SECONDS)
                token, index, wanted = HELLO.unpack(_exactly(line, HELLO.size))
            except OSError:
                token = b""
            if token != self._token:
                line.close()
                continue
            self._early.setdefault((index, wanted), []).append(line)
        line = waiting.pop(0)
        try:
            _prepare(line)
            line.sendall(WELCOME)
        except OSError:
            line.close()
            raise
        return line

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _prepare(line: socket.socket) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.settimeout(ROUND_SECONDS)


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := line.recv(count - len(data))):
            raise ConnectionResetError(errno.ECONNRESET, "the other host has hung up")
        data += more
    return data


def _trips(line: socket.socket) -> tuple[float, float]:
    """Measure round trips of one byte. Returns the median in seconds, and the jitter."""
    found: list[float] = []
    end = time.monotonic() + TRIPS_SECONDS
    while len(found) < FEW_TRIPS or (len(found) <= TRIPS and time.monotonic() < end):
        begin = time.perf_counter()
        line.sendall(b".")
        _exactly(line, 1)
        found.append(time.perf_counter() - begin)
    found.pop(0)  # not counted, since the first round trip also waits for the other host to begin
    median = statistics.median(found)
    return median, max(0.0, statistics.quantiles(found, n=10)[-1] - median)


def _echo(line: socket.socket) -> None:
    while data := line.recv(64):
        line.sendall(data)


def _send(lines: Sequence[socket.socket]) -> None:
    """Send data over all connections until the other host closes them or the time is over."""
    block = bytes(BLOCK)

    def work(line: socket.socket) -> None:
        end = time.monotonic() + SPEED_SECONDS + ROUND_SECONDS
        try:
            while time.monotonic() < end:
                line.sendall(block)
        except OSError:
            pass  # the receiver closes the connection once it has measured for long enough

    _each(work, lines)


def _receive(lines: Sequence[socket.socket]) -> float:
    """Receive data over all connections and return bytes per second. Raises OSError if none arrive."""
    begin = time.monotonic()
    counts = [0] * len(lines)
    closed: list[int] = []

    def work(line: socket.socket) -> None:
        index, room = lines.index(line), bytearray(BLOCK)
        while (left := begin + SPEED_SECONDS - time.monotonic()) > 0:
            line.settimeout(left)
            try:
                count = line.recv_into(room)
            except TimeoutError:
                return
            except OSError:
                count = 0
            if not count:
                closed.append(index)
                return
            if time.monotonic() - begin >= WARM_SECONDS:
                counts[index] += count

    _each(work, lines)
    if closed and not sum(counts):
        raise ConnectionResetError(errno.ECONNRESET, "the other host has hung up")
    if not sum(counts):
        raise OSError(errno.EMSGSIZE, "single bytes arrive, many do not")
    return sum(counts) / (SPEED_SECONDS - WARM_SECONDS)


def _each(work: Callable[[socket.socket], None], lines: Sequence[socket.socket]) -> None:
    with ThreadPoolExecutor(len(lines)) as pool:
        list(pool.map(work, lines))
