"""Decides when to ask which hosts are available, as the list may change during a job, and how an answer changes the
job's hosts."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.errors import ConfigError
from dadt.launch.hosts.candidates import NEVER, Candidates
from dadt.launch.hosts.host import Host

ASK_SECONDS = 1.0
"""Seconds between two questions, unless another interval is asked for."""
ANSWER_SECONDS = 10.0
"""Seconds within which a question is answered at the latest."""


class Discovery:
    """Knows which hosts a job may use now. Does no I/O: `HostReader` asks, and passes the answers on."""

    def __init__(self, hosts: Sequence[Host], now: float, *, changes: bool = False) -> None:
        """hosts: the hosts known so far. changes: whether they may change, so that it makes sense to ask again."""
        self.candidates = Candidates(hosts)
        self._changes = changes
        self._asking = False
        self._warned: set[str] = set()
        self.asked = now
        """Time (time.monotonic) when the hosts were last asked for."""
        self.answered = now if changes else NEVER
        """Time (time.monotonic) when the newest answered question was asked; infinite if the hosts do not change."""

    def asks(self, now: float, seconds: float = ASK_SECONDS) -> bool:
        """Whether to ask for the hosts now, as the last question was asked at least `seconds` seconds ago and has been
        answered. The answer has to be passed to `take`."""
        if not self._changes or self._asking or now - self.asked < seconds:
            return False
        self._asking, self.asked = True, now
        return True

    def take(self, answer: Sequence[Host] | ConfigError) -> str:
        """Apply an answer. Returns a warning for the user, once per text, if it is an error, in which case the hosts
        stay as they were; else an empty text."""
        self._asking, self.answered = False, self.asked
        if not isinstance(answer, ConfigError):
            self.candidates.hosts = list(answer)
            return ""
        if str(answer) in self._warned:
            return ""
        self._warned.add(str(answer))
        return f"{answer}: the hosts stay as they were"
