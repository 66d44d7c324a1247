"""Which addresses and which folders of other hosts this one reaches, as the launcher asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dadt.control import network
from dadt.control.frame import Frame
from dadt.control.shared_folder import Marker


class Probing:
    """Never blocks: `advance` it while it is active."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        """send: takes the answers."""
        self._send = send
        self._probe: network.Probe | None = None
        self._marker: Marker | None = None
        self._seen: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        return self._probe is not None

    def mark(self, folder: str, job: str) -> dict[str, str]:
        """Make a file by which others find out whether they see this folder. Returns what they look for."""
        self._marker = Marker(folder, job)
        return self._marker.describe()

    def unmark(self) -> None:
        """Remove the file that `mark` has made, if there is one; may be called again."""
        if self._marker is not None:
            self._marker.remove()

    def begin(self, order: Frame) -> None:
        """Begin to probe; one that is under way is given up."""
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
