"""Repeatedly asks a script or hostfile which hosts are available, as the list may change during a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from dadt.errors import ConfigError
from dadt.launch.hosts.candidates import NEVER, Candidates
from dadt.launch.hosts.host import Host

ASK_SECONDS = 1.0
"""Seconds between two calls of the script or reads of the hostfile, unless another interval is asked for."""


class Discovery:
    """Knows which hosts a job may use now. Used by one thread and never blocks: the discovery script or hostfile is
    read in a thread of its own."""

    def __init__(
        self,
        hosts: Sequence[Host],
        ask: Callable[[], Sequence[Host]] | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """hosts: the hosts known so far. ask: returns the present hosts or raises ConfigError; None if they do not
        change. warn: called with the text of an error of `ask`, once per text; the hosts then stay as they were."""
        self.candidates = Candidates(hosts)
        self._ask = ask
        self._warn = warn
        self._warned: set[str] = set()
        self._asking: threading.Thread | None = None
        self._answers: list[Sequence[Host] | ConfigError] = []
        """What the asking thread has found, the hosts or an error; read once the thread has ended."""
        self.asked = time.monotonic()
        """Time (time.monotonic) when the hosts were last asked for."""
        self.answered = NEVER if ask is None else self.asked
        """Time (time.monotonic) when the newest answered request was made; infinite if the hosts do not change."""

    def poll(self, seconds: float = ASK_SECONDS) -> None:
        """Apply the newest answer, and ask for the hosts again if the last request was at least `seconds` seconds
        ago."""
        if self._asking is not None and not self._asking.is_alive():
            self._asking, self.answered = None, self.asked
            self._take(self._answers.pop())
        if self._ask is not None and self._asking is None and time.monotonic() - self.asked >= seconds:
            self.asked = time.monotonic()
            self._asking = threading.Thread(target=self._call, args=(self._ask,), name="dadt-hosts", daemon=True)
            self._asking.start()

    def _call(self, ask: Callable[[], Sequence[Host]]) -> None:
        try:
            self._answers.append(ask())
        except ConfigError as error:
            self._answers.append(error)

    def _take(self, answer: Sequence[Host] | ConfigError) -> None:
        if not isinstance(answer, ConfigError):
            self.candidates.hosts = list(answer)
        elif str(answer) not in self._warned:
            self._warned.add(str(answer))
            self._warn(f"{answer}: the hosts stay as they were")
