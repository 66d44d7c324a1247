"""Runs the user's discovery script, or reads the hostfile, in a thread of its own, whenever `Discovery` requests it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from dadt.errors import ConfigError
from dadt.launch.hosts.discovery import ASK_SECONDS, Discovery
from dadt.launch.hosts.host import Host

Read = Callable[[], Sequence[Host]]


class HostReader:
    """Reads the list of hosts for `Discovery`, without ever blocking the calling thread."""

    def __init__(self, discovery: Discovery, read: Read | None, warn: Callable[[str], None]) -> None:
        """read: returns the current hosts, or raises ConfigError; None if the hosts do not change. warn: called with
        the texts of such errors."""
        self._discovery, self._read, self._warn = discovery, read, warn
        self._thread: threading.Thread | None = None
        self._answers: list[Sequence[Host] | ConfigError] = []
        """The result of the thread, which is a list of hosts or an error; taken from here once the thread has ended."""

    def poll(self, seconds: float = ASK_SECONDS) -> None:
        """Pass the result of a thread that has ended to `Discovery`, and read the list of hosts again if the last time
        was at least `seconds` seconds ago."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if warning := self._discovery.take(self._answers.pop()):
                self._warn(warning)
        if self._read is not None and self._discovery.asks(time.monotonic(), seconds):
            self._thread = threading.Thread(target=self._call, args=(self._read,), name="dadt-hosts", daemon=True)
            self._thread.start()

    def _call(self, read: Read) -> None:
        try:
            self._answers.append(read())
        except ConfigError as error:
            self._answers.append(error)
