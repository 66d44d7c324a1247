"""Heartbeats between the agents of two hosts: small authenticated datagrams over the addresses that data use."""

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
from dadt.launch.agent.launcher_line import LauncherLine

SIGN = struct.Struct(">IIQ")
"""Sender, receiver, counter; their HMAC-SHA256 follows."""
SIGN_BYTES = SIGN.size + hashlib.sha256().digest_size
PURPOSE = b"dadt heartbeat"
"""Keeps this key apart from other keys derived from the same secret."""
BEATS = 8
"""Heartbeats sent within the timeout after which a host counts as silent."""
MOST_AT_ONCE = 64
"""Datagrams read in a row before the agent turns to its other work."""


@dataclass(slots=True)
class OtherHost:
    """Another host, as this host hears it."""

    index: int
    place: tuple[str, int]
    heard_at: float
    """Time (time.monotonic) of its last heartbeat; at first, of `begin`."""
    counter: int = 0
    """Counter of its last heartbeat; 0 as long as none has come."""
    silent: bool = False
    given_up: bool = False
    """Whether it was reported that no heartbeat has ever come."""


class HostHeartbeat:
    """One host's end. Single-threaded: it runs in the agent's selector and never blocks."""

    def __init__(self, secret: bytes, index: int, address: str, timeout: float) -> None:
        """Binds to this host's data address only. timeout: seconds. Raises OSError if that is not possible."""
        self._key = hmac.digest(secret, PURPOSE, "sha256")
        self._index = index
        self._timeout = timeout
        self._peers: dict[tuple[str, int], OtherHost] = {}
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
        """Send to and expect heartbeats from these hosts from now on: {index, address, port} of each."""
        now, known, self._peers = time.monotonic(), self._peers, {}
        for host in hosts:
            if host["index"] != self._index:
                place = (host["address"], host["port"])
                self._peers[place] = known.get(place) or OtherHost(host["index"], place, now)

    def read(self) -> None:
        """Read the datagrams that have come, dropping those that are no peer's heartbeat, or an old one."""
        for _ in range(MOST_AT_ONCE):
            try:
                data, source = self._socket.recvfrom(SIGN_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                continue  # an ICMP error about an earlier datagram
            peer = self._peers.get(source[:2])
            if peer is not None and len(data) == SIGN_BYTES:
                self._hear(peer, data)

    def turn(self) -> list[Frame]:
        """Send heartbeats that are due. Returns new frames `silent`, `heard` and `unheard`: {peer, seconds} each."""
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
        """Forgive silence while this process itself was away (stopped, or its machine asleep)."""
        for peer in self._peers.values():
            if not peer.silent:
                peer.heard_at = now

    def _send(self) -> None:
        self._counter += 1
        for peer in self._peers.values():
            sign = SIGN.pack(self._index, peer.index, self._counter)
            with suppress(OSError):  # unreachable now, which the other side notices
                self._socket.sendto(sign + self._proof(sign), peer.place)

    def _hear(self, peer: OtherHost, data: bytes) -> None:
        sign, proof = data[: SIGN.size], data[SIGN.size :]
        sender, receiver, counter = SIGN.unpack(sign)
        if (sender, receiver) != (peer.index, self._index) or counter <= peer.counter:
            return
        if hmac.compare_digest(proof, self._proof(sign)):
            peer.counter = counter
            peer.heard_at = time.monotonic()

    def _look(self, peer: OtherHost, now: float) -> Frame | None:
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


def listen(job: Frame, launcher: LauncherLine) -> HostHeartbeat | None:
    """As the order `job` says; None where it does not, or where this host's address is gone, so that the others will
    not hear it."""
    if (own := job.get("heartbeat")) is None:
        return None
    try:
        heart = HostHeartbeat(bytes.fromhex(job["secret"]), own["index"], own["address"], own["timeout"])
    except OSError:
        launcher.send(Frame("heartbeat", {"port": 0}))
        return None
    launcher.watch(heart.fileno(), heart.read)
    launcher.send(Frame("heartbeat", {"port": heart.port}))
    return heart
