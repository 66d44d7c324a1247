"""Round trips and speed between each two hosts, measured by a process on each of them.

In each round every host is with at most one other, as in a tournament, so that no measurement is in the way of another
one of the same host. A pair begins when both have come to its round: who is first waits, at most until the round's end.
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
"""The head of a connection: the job's token, the caller, and its wish: ECHO, UP or DOWN."""
ECHO, UP, DOWN = range(3)
WELCOME = b"!"
STREAMS = 4
"""Connections at once: one alone does not fill a fast link."""
TRIPS, FEW_TRIPS, TRIPS_SECONDS = 200, 4, 0.5
SPEED_SECONDS, WARM_SECONDS = 1.0, 0.3
"""Each way; the first part does not count: TCP begins slowly."""
BLOCK = 1 << 20
START_SECONDS = 10.0
"""How long the processes of all hosts may take until they listen."""
ROUND_SECONDS = 3.0
AGAIN_SECONDS = 0.02
BACKLOG = 256
STRANGER_SECONDS = 1.0
"""Whoever connects and says nothing within it is not one of us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """An order to a host's process. addresses: [address, port] of each host."""

    index: int
    addresses: Sequence[Sequence[Any]]
    token: str
    speed: bool

    @property
    def seconds(self) -> float:
        """After which all of it is over, whatever hangs."""
        return START_SECONDS + len(rounds(len(self.addresses))) * self.round_seconds

    @property
    def round_seconds(self) -> float:
        return ROUND_SECONDS + (2 * SPEED_SECONDS + ROUND_SECONDS if self.speed else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPair:
    """The way from one host to another, by their indices; what could not be measured is None, and error says why."""

    source: int
    target: int
    seconds: float | None = None
    """Seconds of a round trip, the median."""
    jitter: float | None = None
    """Seconds by which the slowest tenth of the round trips is longer than the median, at least."""
    speed: float | None = None
    """Bytes per second from source to target."""
    error: str = ""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Each two of `count` meet once (the circle method); the lower comes first in a pair."""
    size = count + count % 2
    order = list(range(size))
    found = []
    for _ in range(size - 1):
        pairs = [(order[i], order[size - 1 - i]) for i in range(size // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        order = [order[0], order[-1], *order[1:-1]]
    return found


def measure(order: PairOrder) -> list[HostPair]:
    """This host's findings on its pairs. Never raises for what the network does."""
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
        """Connections of pairs whose turn has not come, by who calls and for what."""

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
        """The lower one calls, and measures round trips. Who receives measures a speed."""
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
        """Up goes from who calls to who answers. Bytes per second, where this host receives."""
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
        """Tries again until it listens. Raises OSError."""
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
            line.settimeout(self._left())  # the other one may still be with somebody else
            _exactly(line, len(WELCOME))
            _prepare(line)
        except OSError:
            line.close()
            raise
        return line

    def _answer(self, other: int, kind: int) -> socket.socket:
        """The next connection of that host for this. Raises OSError."""
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
    """Seconds of the median round trip of one byte, and the jitter."""
    found: list[float] = []
    end = time.monotonic() + TRIPS_SECONDS
    while len(found) < FEW_TRIPS or (len(found) <= TRIPS and time.monotonic() < end):
        begin = time.perf_counter()
        line.sendall(b".")
        _exactly(line, 1)
        found.append(time.perf_counter() - begin)
    found.pop(0)  # it waits for the other host to begin
    median = statistics.median(found)
    return median, max(0.0, statistics.quantiles(found, n=10)[-1] - median)


def _echo(line: socket.socket) -> None:
    while data := line.recv(64):
        line.sendall(data)


def _send(lines: Sequence[socket.socket]) -> None:
    """Send until the other host hangs up, or the time for it is over."""
    block = bytes(BLOCK)

    def work(line: socket.socket) -> None:
        end = time.monotonic() + SPEED_SECONDS + ROUND_SECONDS
        try:
            while time.monotonic() < end:
                line.sendall(block)
        except OSError:
            pass  # as it does when it has received enough

    _each(work, lines)


def _receive(lines: Sequence[socket.socket]) -> float:
    """Bytes per second. Raises OSError where none come."""
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
