"""An agent's connection to its launcher, and the selector with which the agent waits for all its inputs."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable
from typing import Any

from dadt.control.frame import Frame, Link
from dadt.errors import DadtError
from dadt.launch.agent.host_job import TURN_SECONDS
from dadt.launch.agent.launcher_contact import LauncherContact

UNSENT_LIMIT = 4 << 20
"""If more than this number of bytes wait to be sent to the launcher, the agent does not read the workers' output."""


class LauncherLine:
    def __init__(self, link: Link) -> None:
        self._link = link
        self.selector = selectors.DefaultSelector()
        self.orders: list[Frame] = []
        """Orders that have arrived and were not carried out yet."""
        self.gone = False
        self.contact = LauncherContact(time.monotonic())
        self.watch(link.reader, self._read)

    def watch(self, descriptor: int, read: Callable[[], Any]) -> None:
        """Have `select` call `read` whenever the descriptor can be read."""
        self.selector.register(descriptor, selectors.EVENT_READ, read)

    def forget(self, descriptor: int) -> None:
        if descriptor in self.selector.get_map():
            self.selector.unregister(descriptor)

    def select(self, seconds: float) -> None:
        self._watch_writes()
        for key, _ in self.selector.select(seconds):
            key.data()
        if self.contact.is_lost(time.monotonic()):
            self.gone = True

    def send(self, frame: Frame) -> None:
        if not self.gone:
            self._link.post(frame.encode())
            self._flush()

    @property
    def full(self) -> bool:
        """Whether more than UNSENT_LIMIT bytes wait to be sent to the launcher, so that workers' output should not be
        read."""
        return len(self._link.unsent) > UNSENT_LIMIT

    def take_leave(self) -> None:
        """Send all remaining frames before the agent ends, unless the launcher is gone. This blocks until the launcher
        has read them."""
        while self._link.unsent and not self.gone:
            self.select(TURN_SECONDS)

    def _read(self) -> None:
        try:
            self.orders.extend(self._link.receive())
            self.contact.hear(time.monotonic())
        except (EOFError, DadtError) as error:
            if isinstance(error, DadtError):
                sys.stderr.write(f"dadt: the agent ends, as {error}\n")
            self.gone = True
            self.forget(self._link.reader)

    def _watch_writes(self) -> None:
        """Have the selector wake up when the connection accepts bytes that are still to be sent to the launcher."""
        writer = self._link.writer
        waiting = bool(self._link.unsent) and not self.gone
        if not waiting:
            self.forget(writer)
        elif writer not in self.selector.get_map():
            self.selector.register(writer, selectors.EVENT_WRITE, self._flush)

    def _flush(self) -> None:
        try:
            self._link.flush()
        except BrokenPipeError:
            self.gone = True
