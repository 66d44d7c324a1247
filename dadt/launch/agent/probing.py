"""Checks, on the launcher's order, which addresses and folders of other hosts this host can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dadt.control import network
from dadt.control.frame import Frame
from dadt.control.shared_folder import Marker


class Probing:
    """Checks of addresses and folders. Never blocks: call `advance` repeatedly while it is active."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        """send: called with the frame of answers to the launcher."""
        self._send = send
        self._probe: network.Probe | None = None
        self._marker: Marker | None = None
        self._seen: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        return self._probe is not None

    def mark(self, folder: str, job: str) -> dict[str, str]:
        """Create a marker file by which other hosts can check whether they see this folder. Returns a description of
        the file for them."""
        self._marker = Marker(folder, job)
        return self._marker.describe()

    def unmark(self) -> None:
        """Remove the marker file, if this object has created one. May be called again."""
        if self._marker is not None:
            self._marker.remove()

    def begin(self, order: Frame) -> None:
        """Begin to check the addresses that the order names; an earlier check under way is abandoned."""
        if self._probe is not None:
            self._probe.close()
        markers = order.get("markers", ())
        self._seen = {"seen": self._marker.seen(markers)} if markers and self._marker is not None else {}
        self._probe = network.Probe(order["targets"])
        self._probe.start()

    def advance(self) -> None:
        if self._probe is None:
            return
        self._probe.advance()
        if self._probe.finished:
            self._probe.close()
            self._send(Frame("probed", {"reached": self._probe.reached, **self._seen}))
            self._probe = None
