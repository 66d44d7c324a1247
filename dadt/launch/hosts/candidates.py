"""Tracks which hosts a job may use at the moment. A host that has failed is paused, that is, not used for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dadt.launch.hosts.host import Host

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
"""Seconds for which a host is paused after its first failure, and the longest pause after repeated failures."""
SERVED_SECONDS = 60.0
"""If workers ran on a host for more than this many seconds before it fails, its pause is as short as after a first
failure."""
NEVER = float("inf")


@dataclass(slots=True)
class HostPause:
    """The pause of a host that has failed, during which it is not used."""

    seconds: float = 0.0
    until: float = 0.0
    """Time (time.monotonic) from which the host may be used again."""
    served: float = 0.0
    """Time (time.monotonic) at which workers began to run on the host; 0 if none run there."""


class Candidates:
    """The hosts that a job may use, across all attempts to run it."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = list(hosts)
        """Hosts that exist at the moment, in the order in which workers are placed on them."""
        self._pauses: dict[str, HostPause] = {}

    def usable(self, now: float) -> list[Host]:
        """Return the hosts that may be used now, which excludes those that are paused."""
        return [host for host in self.hosts if self._is_usable(host, now)]

    def due(self, now: float) -> float:
        """Return the seconds until a host that was paused after a failure may be used again; infinite if no host is
        paused."""
        away = (host for host in self.hosts if not self._is_usable(host, now))
        return min((self._pause(host).until - now for host in away), default=NEVER)

    def served(self, hosts: Iterable[Host], now: float) -> None:
        """Record that workers begin to run on these hosts."""
        for host in hosts:
            self._pauses.setdefault(host.name, HostPause()).served = now

    def failed(self, host: Host, now: float, busy_until: float = 0.0) -> None:
        """Pause a host that cannot be reached, or whose agent was lost or asked to end. Each pause is twice as long as
        the last one. Does nothing while the host is paused already. busy_until: time until which workers may still run
        on the host; the pause lasts at least until then."""
        pause = self._pauses.setdefault(host.name, HostPause())
        if pause.until > now:
            return
        if pause.served and now - pause.served > SERVED_SECONDS:
            pause.seconds = 0.0
        pause.served = 0.0
        pause.seconds = min(2 * pause.seconds, LONGEST_PAUSE_SECONDS) or PAUSE_SECONDS
        pause.until = max(now + pause.seconds, busy_until)

    def blame(self, hosts: Sequence[Host], now: float) -> None:
        """Record that a job could not be started on these hosts. If none of them is paused, it is not known which one
        failed, so all are paused."""
        if all(self._is_usable(host, now) for host in hosts):
            for host in hosts:
                self.failed(host, now)

    def _is_usable(self, host: Host, now: float) -> bool:
        return self._pause(host).until <= now

    def _pause(self, host: Host) -> HostPause:
        return self._pauses.get(host.name, HostPause())
