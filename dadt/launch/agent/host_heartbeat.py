"""Heartbeats between the agents of two hosts: small authenticated UDP datagrams between the addresses that also carry
training data."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dadt.control.frame import Frame
from dadt.control.priority import set_urgent
from dadt.launch.agent.launcher_line import LauncherLine
from dadt.launch.agent.other_hosts import OtherHost, OtherHosts

SIGN = struct.Struct(">IIQ")
"""Layout of a heartbeat: index of the sending host, index of the receiving host, counter. The HMAC-SHA256 of these
bytes follows."""
SIGN_BYTES = SIGN.size + hashlib.sha256().digest_size
PURPOSE = b"dadt heartbeat"
"""Label from which, with the job's secret, the heartbeats' key is derived; other keys are derived from the secret with
other labels."""
MOST_AT_ONCE = 64
"""Number of datagrams that are read in a row before the agent does other work."""


class HostHeartbeat:
    """Sends and receives one host's heartbeats. Runs in the agent's single thread and never blocks."""

    def __init__(self, secret: bytes, index: int, address: str, timeout: float) -> None:
        """Bind a UDP socket to the address that this host uses for training data, and to no other. timeout: seconds
        after which a host counts as silent. Raises OSError if the address cannot be bound."""
        self._key = hmac.digest(secret, PURPOSE, "sha256")
        self._index = index
        self._hosts = OtherHosts(index, timeout)
        self._counter = 0
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((address, 0))
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        set_urgent(self._socket)
        self.port = int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, hosts: Sequence[Mapping[str, Any]]) -> None:
        """Begin to exchange heartbeats with `hosts`, each given by its index, address and port. This host itself is
        skipped."""
        self._hosts.begin(hosts, time.monotonic())

    def read(self) -> None:
        """Read the datagrams that have arrived. Those that are not a valid heartbeat of another host, or not newer than
        the last one, are dropped."""
        for _ in range(MOST_AT_ONCE):
            try:
                data, source = self._socket.recvfrom(SIGN_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                continue  # the socket reports an ICMP error about a datagram sent earlier
            sender = self._hosts.by_place.get(source[:2])
            if sender is not None and len(data) == SIGN_BYTES:
                self._hear(sender, data)

    def turn(self) -> list[Frame]:
        """Send heartbeats if they are due. Returns frames that report hosts as `silent`, `heard` (again) or `unheard`
        (never heard so far), with the host's index and the seconds of silence."""
        now = time.monotonic()
        if self._hosts.is_beat_due(now):
            self._send()
        return self._hosts.turn(now)

    def close(self) -> None:
        self._socket.close()

    def _send(self) -> None:
        self._counter += 1
        for place, other in self._hosts.by_place.items():
            sign = SIGN.pack(self._index, other.index, self._counter)
            with suppress(OSError):  # if the other host is unreachable, its agent notices that heartbeats are missing
                self._socket.sendto(sign + self._proof(sign), place)

    def _hear(self, sender: OtherHost, data: bytes) -> None:
        sign, proof = data[: SIGN.size], data[SIGN.size :]
        index, receiver, counter = SIGN.unpack(sign)
        if (index, receiver) != (sender.index, self._index) or counter <= sender.counter:
            return
        if hmac.compare_digest(proof, self._proof(sign)):
            sender.counter = counter
            self._hosts.hear(index, time.monotonic())

    def _proof(self, sign: bytes) -> bytes:
        return hmac.digest(self._key, sign, "sha256")


def listen(job: Frame, launcher: LauncherLine) -> HostHeartbeat | None:
    """Create the socket for heartbeats if the order `job` requests it, and report its port to the launcher. Returns
    None if no heartbeats are requested, or if the socket cannot be bound to this host's address; port 0 is reported
    then."""
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
