"""Signs of life between the agents of two hosts, over the addresses that their data take: small datagrams, proved."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dadt.control.frame import Frame

SIGN = struct.Struct(">IIQ")
"""Sender, receiver, counter; HMAC-SHA256 of them comes after."""
SIGN_BYTES = SIGN.size + hashlib.sha256().digest_size
PURPOSE = b"dadt heartbeat"
"""What keeps this key apart from others of the same secret."""
BEATS = 8
"""Signs within the time after which a host counts as silent."""
MOST_AT_ONCE = 64
"""Datagrams read before others get their turn."""


@dataclass(slots=True)
class Peer:
    """Another host, as this one hears it."""

    index: int
    place: tuple[str, int]
    heard_at: float
    """time.monotonic; at first, when it was begun with."""
    counter: int = 0
    """Of its last sign: 0 as long as none has come."""
    silent: bool = False
    given_up: bool = False
    """No sign has ever come."""


class HostHeartbeat:
    """One host's end. Single-threaded: lives in the agent's selector, and never waits."""

    def __init__(self, secret: bytes, index: int, address: str, timeout: float) -> None:
        """Bound to this host's data address only. timeout: seconds. Raises OSError where that is not possible."""
        self._key = hmac.digest(secret, PURPOSE, "sha256")
        self._index = index
        self._timeout = timeout
        self._peers: dict[tuple[str, int], Peer] = {}
        self._counter = 0
        self._sent = self._turned = float("-inf")
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((address, 0))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, hosts: Sequence[Mapping[str, Any]]) -> None:
        """With these: {index, address, port} of all hosts."""
        now = time.monotonic()
        for host in hosts:
            if host["index"] != self._index:
                place = (host["address"], host["port"])
                self._peers[place] = Peer(host["index"], place, now)

    def read(self) -> None:
        """Take what has come. What is none of a peer's signs, or an old one, is dropped."""
        for _ in range(MOST_AT_ONCE):
            try:
                data, source = self._socket.recvfrom(SIGN_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                continue  # an earlier one was sent back
            peer = self._peers.get(source[:2])
            if peer is not None and len(data) == SIGN_BYTES:
                self._hear(peer, data)

    def turn(self) -> list[Frame]:
        """Send what is due, and tell what is new: `silent`, `heard` and `unheard`, each with {peer, seconds}."""
        now = time.monotonic()
        if now - self._turned > self._timeout / 2:
            self._excuse(now)
        self._turned = now
        if now - self._sent >= self._timeout / BEATS:
            self._sent = now
            self._send()
        return [frame for peer in self._peers.values() if (frame := self._look(peer, now)) is not None]

    def close(self) -> None:
        self._socket.close()

    def _excuse(self, now: float) -> None:
        """This process itself was away (stopped, or its machine asleep): that was no silence of others."""
        for peer in self._peers.values():
            if not peer.silent:
                peer.heard_at = now

    def _send(self) -> None:
        self._counter += 1
        for peer in self._peers.values():
            sign = SIGN.pack(self._index, peer.index, self._counter)
            with suppress(OSError):  # no way there just now: the other side notices
                self._socket.sendto(sign + self._proof(sign), peer.place)

    def _hear(self, peer: Peer, data: bytes) -> None:
        sign, proof = data[: SIGN.size], data[SIGN.size :]
        sender, receiver, counter = SIGN.unpack(sign)
        if (sender, receiver) != (peer.index, self._index) or counter <= peer.counter:
            return
        if hmac.compare_digest(proof, self._proof(sign)):
            peer.counter = counter
            peer.heard_at = time.monotonic()

    def _look(self, peer: Peer, now: float) -> Frame | None:
        seconds = now - peer.heard_at
        late = seconds >= self._timeout
        if late and not peer.counter and not peer.given_up:
            peer.given_up = True
            return Frame("unheard", {"peer": peer.index, "seconds": seconds})
        if peer.counter and late != peer.silent:
            peer.silent = late
            return Frame("silent" if late else "heard", {"peer": peer.index, "seconds": seconds})
        return None

    def _proof(self, sign: bytes) -> bytes:
        return hmac.digest(self._key, sign, "sha256")
