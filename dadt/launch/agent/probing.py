"""Checks, when the launcher orders it, which addresses and which shared folders of other hosts this host can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dadt.control import network
from dadt.control.frame import Frame
from dadt.control.shared_folder import Marker


class Probing:
    """The checks of other hosts' addresses and folders that the launcher has ordered. Never blocks: the caller has to
    call `advance` repeatedly while a check is active."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        """send: called with the frame that reports the results to the launcher."""
        self._send = send
        self._probe: network.Probe | None = None
        self._marker: Marker | None = None
        self._seen: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        return self._probe is not None

    def mark(self, folder: str, job: str) -> dict[str, str]:
        """Create a marker file in the working folder, by which other hosts can check whether they see the same folder.
        Returns a description of the marker file."""
        self._marker = Marker(folder, job)
        return self._marker.describe()

    def unmark(self) -> None:
        """Remove the marker file, if `mark` has created one. May be called repeatedly."""
        if self._marker is not None:
            self._marker.remove()

    def begin(self, order: Frame) -> None:
        """Begin to check the addresses and folders that the order names, and abandon a check that is still in
        progress."""
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
