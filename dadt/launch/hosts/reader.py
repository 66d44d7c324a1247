"""Runs the discovery script, or reads the hostfile, in a thread of its own, whenever `Discovery` asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from dadt.errors import ConfigError
from dadt.launch.hosts.discovery import ASK_SECONDS, Discovery
from dadt.launch.hosts.host import Host

Read = Callable[[], Sequence[Host]]


class HostReader:
    """Asks which hosts exist, and never blocks the calling thread."""

    def __init__(self, discovery: Discovery, read: Read | None, warn: Callable[[str], None]) -> None:
        """read: returns the present hosts or raises ConfigError; None if they do not change. warn: called with the
        texts of such errors."""
        self._discovery, self._read, self._warn = discovery, read, warn
        self._thread: threading.Thread | None = None
        self._answers: list[Sequence[Host] | ConfigError] = []
        """The thread's result, the hosts or an error; taken once the thread has ended."""

    def poll(self, seconds: float = ASK_SECONDS) -> None:
        """Pass on the newest answer, and ask again if the last question is at least `seconds` seconds old."""
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
