"""Which hosts there are now, and which of them may be tried: a script or a hostfile may name others as time passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dadt.errors import ConfigError
from dadt.launch.hosts.host import Host

ASK_SECONDS = 1.0
"""Time between two questions, where nobody wants another."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
"""How long a host is left alone that has failed for the first time, and the longest such time."""
NEVER = float("inf")
SERVED_SECONDS = 60.0
"""A host that has served for more than this many seconds before it fails begins with the first pause again."""


@dataclass(slots=True)
class Pause:
    """How long a host is left alone that has failed."""

    seconds: float = 0.0
    until: float = 0.0
    """Time at which it may be tried again (time.monotonic)."""
    served: float = 0.0
    """Time (time.monotonic) since when it has served; 0: it does not."""


class Discovery:
    """One per job, for one thread. Never blocks: who names the hosts is asked in a thread of its own."""

    def __init__(
        self,
        hosts: Sequence[Host],
        ask: Callable[[], Sequence[Host]] | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """hosts: those that are known so far. ask: returns those that there are now, or raises ConfigError; None if
        they do not change. warn: called with what is wrong with an answer, each text once; the hosts stay then."""
        self.hosts = list(hosts)
        """The hosts that there are now, in the order in which they are filled."""
        self._ask = ask
        self._warn = warn
        self._warned: set[str] = set()
        self._pauses: dict[str, Pause] = {}
        self._asking: threading.Thread | None = None
        self._answers: list[Sequence[Host] | ConfigError] = []
        """What the asking thread has found, the hosts or an error; read once the thread has ended."""
        self.asked = time.monotonic()
        """Time (time.monotonic) of the newest question."""
        self.answered = NEVER if ask is None else self.asked
        """Time at which the newest question was put that has been answered; infinite where the hosts do not change."""

    def poll(self, seconds: float = ASK_SECONDS) -> None:
        """Take the newest answer. Ask again if the last question was put at least `seconds` ago."""
        if self._asking is not None and not self._asking.is_alive():
            self._asking, self.answered = None, self.asked
            self._take(self._answers.pop())
        if self._ask is not None and self._asking is None and time.monotonic() - self.asked >= seconds:
            self.asked = time.monotonic()
            self._asking = threading.Thread(target=self._call, args=(self._ask,), name="dadt-hosts", daemon=True)
            self._asking.start()

    @property
    def usable(self) -> list[Host]:
        """The hosts that may be tried now."""
        return [host for host in self.hosts if self._is_usable(host)]

    @property
    def due(self) -> float:
        """Seconds until the next of the hosts that failed may be tried; infinite if none is to come."""
        now = time.monotonic()
        return min((self._pause(host).until - now for host in self.hosts if not self._is_usable(host)), default=NEVER)

    def served(self, hosts: Iterable[Host]) -> None:
        """Note that workers begin to run on these hosts."""
        for host in hosts:
            self._pauses.setdefault(host.name, Pause()).served = time.monotonic()

    def failed(self, host: Host) -> None:
        """Leave a host alone for twice as long as the last time: it cannot be reached, or its agent was lost or asked
        to end. Reporting it again while it is left alone changes nothing."""
        now = time.monotonic()
        pause = self._pauses.setdefault(host.name, Pause())
        if pause.until > now:
            return
        if pause.served and now - pause.served > SERVED_SECONDS:
            pause.seconds = 0.0
        pause.served = 0.0
        pause.seconds = min(2 * pause.seconds, LONGEST_PAUSE_SECONDS) or PAUSE_SECONDS
        pause.until = now + pause.seconds

    def blame(self, hosts: Sequence[Host]) -> None:
        """Nothing could be started on these hosts. Where it is not known which of them has failed, leave all alone."""
        if all(map(self._is_usable, hosts)):
            for host in hosts:
                self.failed(host)

    def _is_usable(self, host: Host) -> bool:
        return self._pause(host).until <= time.monotonic()

    def _pause(self, host: Host) -> Pause:
        return self._pauses.get(host.name, Pause())

    def _call(self, ask: Callable[[], Sequence[Host]]) -> None:
        try:
            self._answers.append(ask())
        except ConfigError as error:
            self._answers.append(error)

    def _take(self, answer: Sequence[Host] | ConfigError) -> None:
        if not isinstance(answer, ConfigError):
            self.hosts = list(answer)
        elif str(answer) not in self._warned:
            self._warned.add(str(answer))
            self._warn(f"{answer}: the hosts stay as they were")
