"""Which addresses of other hosts this one reaches, as the launcher asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dadt.control import network
from dadt.control.frame import Frame


class Probing:
    """Never blocks: `advance` it while it is active."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        """send: takes the answers."""
        self._send = send
        self._probe: network.Probe | None = None

    @property
    def active(self) -> bool:
        return self._probe is not None

    def begin(self, targets: Sequence[Mapping[str, Any]]) -> None:
        """Begin to probe; one that is under way is given up."""
        if self._probe is not None:
            self._probe.close()
        self._probe = network.Probe(targets)
        self._probe.start()

    def advance(self) -> None:
        if self._probe is None:
            return
        self._probe.advance()
        if self._probe.finished:
            self._probe.close()
            self._send(Frame("probed", {"reached": self._probe.reached}))
            self._probe = None
