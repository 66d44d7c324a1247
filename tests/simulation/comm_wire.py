"""Connections of bytes between ranks: in order, cut into pieces at random, with latencies, cuts, and what a broken peer
sends."""

from __future__ import annotations

import re
import socket
import struct
from collections import Counter
from collections.abc import Callable

from simulation.world import Do, Link, World

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<II")
"""What precedes each message: its length, and how many were sent before it."""
_KINDS = {1: "report", 2: "decision", 3: "giving up", 4: "goodbye", 5: "order"}
_TEXT = re.compile(rb"[ -~]{3,}")
MOST_SHOWN = 100


def kind_of(message: bytes) -> str:
    """The kind of a message of the negotiation; its length goes before it, but not its number."""
    return _KINDS.get(message[4], "unknown") if len(message) > 4 else "unknown"


def shown(message: bytes) -> str:
    """A message as a line of a log."""
    words = b", ".join(_TEXT.findall(message[5:]))[:MOST_SHOWN].decode()
    return f"{kind_of(message)}, {len(message)} bytes" + (f": {words}" if words else "")


class ByteWire:
    """One direction of a connection between two ranks, over which messages go as bytes."""

    def __init__(self, world: World, name: str, latency: float, into: socket.socket, heard: Do) -> None:
        """into: this world's end of the receiver's connection. heard: called when something has come."""
        self._world, self._name = world, name
        self._into, self._heard = into, heard
        self.link = Link(world, latency, self._come)
        self._begun = b""
        """The first bytes of a message that is not complete yet."""
        self._unread = bytearray()
        """What has come while the receiver's memory was full."""
        self._ends = False
        """Whether nothing comes any more."""
        self.kinds = Counter[str]()
        """How many messages of each kind the sender has sent."""
        self.sent: list[bytes] = []
        """The newest messages, without their numbers."""
        self._number = 0

    @property
    def messages(self) -> int:
        return self.kinds.total()

    def send(self, data: bytes) -> None:
        """Pass on what the sender has written, message by message."""
        self._begun += data
        while len(self._begun) >= _HEAD.size:
            length, _ = _HEAD.unpack_from(self._begun)
            end = _HEAD.size + length
            if len(self._begun) < end:
                return
            message, self._begun = _LENGTH.pack(length) + self._begun[_HEAD.size : end], self._begun[end:]
            self.kinds[kind_of(message)] += 1
            self.sent = [*self.sent[-7:], message]
            self.put(message)

    def put(self, data: bytes) -> None:
        """Send a message, or what stands for one, with the number that the receiver awaits: what ranks make of messages
        that are repeated or left out would else never be seen."""
        if not self.link.open:
            return
        if self._world.log is not None:
            self._world.note(self._name, shown(data))
        data = data[: _LENGTH.size] + struct.pack("<I", self._number) + data[_LENGTH.size :]
        self._number += 1
        random = self._world.random
        at = random.randrange(1, len(data)) if len(data) > 1 and random.random() < 0.1 else 0  # TCP cuts where it likes
        for piece in (data[:at], data[at:]) if at else (data,):
            self.link.send(piece)

    def _come(self, data: bytes | None) -> None:
        if data is None:
            self._ends = True
        else:
            self._unread += data
        self.flush()
        self._heard()

    def flush(self) -> None:
        """Hand over what the receiver has had no memory for so far, and then the end."""
        try:
            while self._unread:
                del self._unread[: self._into.send(self._unread)]
            if self._ends:
                self._into.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:  # the receiver has closed it
            self._unread.clear()

    def end(self) -> None:
        """The connection has broken for the receiver: it reads its end."""
        self._come(None)


class RankConnection:
    """A connection of one rank with rank 0: a pair of sockets on each side, and this world between them."""

    def __init__(self, world: World, rank: int, latency: float, heard: Callable[[int], None]) -> None:
        """heard: called with the rank to which something has come."""
        self.rank = rank
        ours, self.of_rank = socket.socketpair()
        theirs, self.of_rank_0 = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        self._ours = {rank: ours, 0: theirs}
        self.wires = {
            rank: ByteWire(world, f"{rank} -> 0", latency, theirs, lambda: heard(0)),
            0: ByteWire(world, f"0 -> {rank}", latency, ours, lambda: heard(rank)),
        }
        """The two directions, by the rank that sends."""

    def pump(self, sender: int) -> None:
        """Take what a rank has written."""
        self.wires[self.rank - sender].flush()
        wire, ours = self.wires[sender], self._ours[sender]
        while wire.link.open:
            try:
                data = ours.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                wire.send(data)
            else:
                wire.link.close()

    def close(self) -> None:
        for each in self._ours.values():
            each.close()
