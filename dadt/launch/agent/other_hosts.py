"""Decides from the heartbeats that arrive which other hosts count as silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dadt.control.absence import Absence
from dadt.control.frame import Frame

BEATS = 8
"""Number of heartbeats that a host sends within the timeout after which it would count as silent."""
FIRST_SECONDS = 0.25
"""Seconds between the first heartbeats of a host: another host that has not begun yet receives none, and a link on
which no heartbeat has ever arrived cannot be noticed to fail."""


@dataclass(slots=True)
class OtherHost:
    """Facts about another host that this host knows from the heartbeats that have arrived from there."""

    index: int
    place: tuple[str, int]
    """Address and port with which the other host sends and receives heartbeats."""
    heard_at: float
    """Time (time.monotonic) at which the host's last heartbeat arrived; before the first one, the time at which `begin`
    was called."""
    counter: int = 0
    """The counter that the host's last heartbeat contained; 0 before the first one."""
    ever_heard: bool = False
    silent: bool = False
    given_up: bool = False
    """Whether the agent's last report was that no heartbeat has ever come from this host."""


class OtherHosts:
    """Tracks from which other hosts heartbeats arrive, and when this host's next heartbeat is due."""

    def __init__(self, index: int, timeout: float) -> None:
        """index: number of this host in the job. timeout: seconds after which a host counts as silent."""
        self._index = index
        self._timeout = timeout
        self._hosts: dict[int, OtherHost] = {}
        self.by_place: Mapping[tuple[str, int], OtherHost] = {}
        """The other hosts, by the address and port with which they send heartbeats."""
        self._sent = self._begun = float("-inf")
        self._absence = Absence(self._sent)

    def begin(self, hosts: Sequence[Mapping[str, Any]], now: float) -> None:
        """Begin to expect heartbeats from `hosts`, each given by its index, address and port. This host itself is
        skipped."""
        known, self._hosts = self._hosts, {}
        self._sent, self._begun = float("-inf"), now
        for host in hosts:
            index, place = host["index"], (host["address"], host["port"])
            if index != self._index:
                same = known[index] if index in known and known[index].place == place else None
                self._hosts[index] = same or OtherHost(index, place, now)
        self.by_place = {host.place: host for host in self._hosts.values()}

    def hear(self, index: int, now: float) -> None:
        """Record that a heartbeat from host `index` has arrived."""
        if (host := self._hosts.get(index)) is not None:
            host.heard_at, host.ever_heard = now, True

    def is_beat_due(self, now: float) -> bool:
        """Return whether a heartbeat to the other hosts is due, and count it as sent if so."""
        pause = self._timeout / BEATS
        due = now - self._sent >= (min(pause, FIRST_SECONDS) if now - self._begun < pause else pause)
        if due:
            self._sent = now
        return due

    def turn(self, now: float) -> list[Frame]:
        """Return frames that report hosts as `silent`, `heard` (again) or `unheard` (never heard so far), with the
        host's index and port, which tell it from one that had the same index before, and the seconds of silence. Call
        regularly."""
        if self._absence.has_ended(self._timeout, now):
            self._excuse(now)
        return [frame for host in self._hosts.values() if (frame := self._look(host, now)) is not None]

    def _excuse(self, now: float) -> None:
        """Count the other hosts as heard just now, because this process itself was stopped, or its machine asleep, and
        could not receive their heartbeats."""
        for host in self._hosts.values():
            if not host.silent:
                host.heard_at = now

    def _look(self, host: OtherHost, now: float) -> Frame | None:
        late = now - host.heard_at >= self._timeout
        if late and not host.ever_heard and not host.given_up:
            host.given_up = True
            kind = "unheard"
        elif host.ever_heard and (late != host.silent or host.given_up):
            host.silent, host.given_up = late, False
            kind = "silent" if late else "heard"
        else:
            return None
        return Frame(kind, {"peer": host.index, "port": host.place[1], "seconds": now - host.heard_at})
