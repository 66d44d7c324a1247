"""Decides when to request the list of available hosts, which may change during a job, and how an answer changes the
job's hosts."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.errors import ConfigError
from dadt.launch.hosts.candidates import NEVER, Candidates
from dadt.launch.hosts.host import Host

ASK_SECONDS = 1.0
"""Minimum seconds between two requests for the list of hosts, unless the caller passes another number."""
ANSWER_SECONDS = 10.0
"""Seconds after which a request for the list of hosts has been answered at the latest."""


class Discovery:
    """Keeps the list of hosts that a job may use now. Does no I/O itself: `HostReader` reads the list and passes it to
    `take`."""

    def __init__(self, hosts: Sequence[Host], now: float, *, changes: bool = False) -> None:
        """hosts: the hosts known so far. changes: whether the list of hosts may change, so that it is requested
        again."""
        self.candidates = Candidates(hosts)
        self._changes = changes
        self._asking = False
        self._warned: set[str] = set()
        self.asked = now
        """Time (time.monotonic) of the last request for the list of hosts."""
        self.answered = now if changes else NEVER
        """Time (time.monotonic) of the latest request that was answered; infinite if the list does not change."""

    def asks(self, now: float, seconds: float = ASK_SECONDS) -> bool:
        """Return whether to request the list of hosts now, because the last request was made at least `seconds` seconds
        ago and was answered. If so, the caller has to pass the answer to `take`."""
        if not self._changes or self._asking or now - self.asked < seconds:
            return False
        self._asking, self.asked = True, now
        return True

    def take(self, answer: Sequence[Host] | ConfigError) -> str:
        """Store the answer to a request. If the answer is an error, the hosts stay as they were, and a warning for the
        user is returned, but only once for each text; otherwise the result is empty."""
        self._asking, self.answered = False, self.asked
        if not isinstance(answer, ConfigError):
            self.candidates.hosts = list(answer)
            return ""
        if str(answer) in self._warned:
            return ""
        self._warned.add(str(answer))
        return f"{answer}: the hosts stay as they were"
