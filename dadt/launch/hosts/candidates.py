"""Which hosts there are now, and which of them may be tried: one that fails is left alone for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dadt.launch.hosts.host import Host

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
"""How long a host is left alone that has failed for the first time, and the longest such time."""
SERVED_SECONDS = 60.0
"""A host that has served for more than this many seconds before it fails begins with the first pause again."""
NEVER = float("inf")


@dataclass(slots=True)
class HostPause:
    """How long a host is left alone that has failed."""

    seconds: float = 0.0
    until: float = 0.0
    """Time at which it may be tried again (time.monotonic)."""
    served: float = 0.0
    """Time (time.monotonic) since when it has served; 0: it does not."""


class Candidates:
    """The hosts of a job, over all its attempts."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = list(hosts)
        """The hosts that there are now, in the order in which they are filled."""
        self._pauses: dict[str, HostPause] = {}

    def usable(self, now: float) -> list[Host]:
        """The hosts that may be tried."""
        return [host for host in self.hosts if self._is_usable(host, now)]

    def due(self, now: float) -> float:
        """Seconds until the next of the hosts that failed may be tried; infinite if none is to come."""
        away = (host for host in self.hosts if not self._is_usable(host, now))
        return min((self._pause(host).until - now for host in away), default=NEVER)

    def served(self, hosts: Iterable[Host], now: float) -> None:
        """Note that workers begin to run on these hosts."""
        for host in hosts:
            self._pauses.setdefault(host.name, HostPause()).served = now

    def failed(self, host: Host, now: float) -> None:
        """Leave a host alone for twice as long as the last time: it cannot be reached, or its agent was lost or asked
        to end. Reporting it again while it is left alone changes nothing."""
        pause = self._pauses.setdefault(host.name, HostPause())
        if pause.until > now:
            return
        if pause.served and now - pause.served > SERVED_SECONDS:
            pause.seconds = 0.0
        pause.served = 0.0
        pause.seconds = min(2 * pause.seconds, LONGEST_PAUSE_SECONDS) or PAUSE_SECONDS
        pause.until = now + pause.seconds

    def blame(self, hosts: Sequence[Host], now: float) -> None:
        """Nothing could be started on these hosts. Where it is not known which of them has failed, leave all alone."""
        if all(self._is_usable(host, now) for host in hosts):
            for host in hosts:
                self.failed(host, now)

    def _is_usable(self, host: Host, now: float) -> bool:
        return self._pause(host).until <= now

    def _pause(self, host: Host) -> HostPause:
        return self._pauses.get(host.name, HostPause())
