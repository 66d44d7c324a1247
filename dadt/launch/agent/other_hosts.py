"""Decides which other hosts an agent hears, from the heartbeats that come from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dadt.control.absence import Absence
from dadt.control.frame import Frame

BEATS = 8
"""Number of heartbeats sent within the timeout after which a host counts as silent."""


@dataclass(slots=True)
class OtherHost:
    """Another host, as seen by this host's heartbeats."""

    index: int
    place: tuple[str, int]
    """Address and port of its heartbeats."""
    heard_at: float
    """Time (time.monotonic) of the host's last heartbeat; before the first one, time of the call of `begin`."""
    counter: int = 0
    """Counter in the host's last heartbeat; 0 before the first one."""
    ever_heard: bool = False
    silent: bool = False
    given_up: bool = False
    """Whether the agent has reported that no heartbeat has ever come from this host."""


class OtherHosts:
    """Tracks from which other hosts heartbeats arrive, and when this host's next heartbeat is due."""

    def __init__(self, index: int, timeout: float) -> None:
        """index: this host. timeout: seconds after which a host counts as silent."""
        self._index = index
        self._timeout = timeout
        self._hosts: dict[int, OtherHost] = {}
        self.by_place: Mapping[tuple[str, int], OtherHost] = {}
        """The other hosts by address and port of their heartbeats."""
        self._sent = float("-inf")
        self._absence = Absence(self._sent)

    def begin(self, hosts: Sequence[Mapping[str, Any]], now: float) -> None:
        """Begin to expect heartbeats of `hosts`: index, address and port of each host of the job."""
        known, self._hosts = self._hosts, {}
        for host in hosts:
            index, place = host["index"], (host["address"], host["port"])
            if index != self._index:
                same = known[index] if index in known and known[index].place == place else None
                self._hosts[index] = same or OtherHost(index, place, now)
        self.by_place = {host.place: host for host in self._hosts.values()}

    def hear(self, index: int, now: float) -> None:
        """Record that a heartbeat of this host has come."""
        if (host := self._hosts.get(index)) is not None:
            host.heard_at, host.ever_heard = now, True

    def is_beat_due(self, now: float) -> bool:
        """Whether a heartbeat to the other hosts is due. Each heartbeat is reported as due only once."""
        due = now - self._sent >= self._timeout / BEATS
        if due:
            self._sent = now
        return due

    def turn(self, now: float) -> list[Frame]:
        """Returns frames that report hosts as `silent`, `heard` (again) or `unheard` (never), with the host's index and
        the seconds of silence. Call regularly."""
        if self._absence.has_ended(self._timeout, now):
            self._excuse(now)
        return [frame for host in self._hosts.values() if (frame := self._look(host, now)) is not None]

    def _excuse(self, now: float) -> None:
        """Do not count time in which this process itself did not run (stopped, or its machine asleep) as silence of the
        other hosts."""
        for host in self._hosts.values():
            if not host.silent:
                host.heard_at = now

    def _look(self, host: OtherHost, now: float) -> Frame | None:
        seconds = now - host.heard_at
        late = seconds >= self._timeout
        if late and not host.ever_heard and not host.given_up:
            host.given_up = True
            return Frame("unheard", {"peer": host.index, "seconds": seconds})
        if host.ever_heard and late != host.silent:
            host.silent = late
            return Frame("silent" if late else "heard", {"peer": host.index, "seconds": seconds})
        return None
