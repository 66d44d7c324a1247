"""Measures the traffic on the links between hosts, from the ranks' reports about their connections."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from dadt.launch.members.member import Member

WINDOW_SECONDS = 10.0
"""Length in seconds of the window over which the traffic of a link is measured."""
MARK_SECONDS = 1.0
BULK_BYTES = 1 << 20
"""Number of bytes that a link must carry in the window for its rate to be known, since the time of a small message
depends on latency alone."""
MOST_SHOWN = 256
"""Largest number of links that are shown and exported; those that have carried the most bytes are chosen."""


class Mark(NamedTuple):
    """Totals of a link's traffic up to one time."""

    seen: float
    sent: int = 0
    resent: int = 0
    busy: float = 0.0
    round_trip: float = 0.0


class Recent(NamedTuple):
    """The traffic on a link during the last seconds."""

    seconds: float
    sent: int
    resent: int
    busy: float
    round_trip: float = 0.0

    @property
    def under_way(self) -> float:
        """Mean number of bytes in flight, averaged over the time in which any are."""
        return self.round_trip * self.sent / self.busy if self.busy > 0 else 0.0

    @property
    def rate(self) -> float | None:
        """Bits per second, over the time in which bytes were in flight; None if the link carried too few bytes."""
        return 8 * self.sent / self.busy if self.sent >= BULK_BYTES and self.busy > 0 else None

    @property
    def resent_ratio(self) -> float:
        """Share of the bytes that were sent again."""
        return self.resent / (self.sent + self.resent) if self.resent else 0.0


@dataclass(slots=True)
class Part:
    """One rank's reports about a link: the totals of the rank's earlier workers, and the last report of its current
    worker."""

    before: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)

    def hear(self, told: Mapping[str, float]) -> None:
        # A new worker of the rank begins to count at 0.
        if any(told[name] < self.last.get(name, 0) for name in ("sent", "received")):
            self.before = {name: self.total(name) for name in ("sent", "received", "resent", "busy")}
        self.last = told

    def total(self, name: str) -> float:
        return self.last.get(name, 0) + self.before.get(name, 0)


@dataclass(slots=True)
class HostLink:
    """The link from one host to another."""

    source: str
    target: str
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    """Reports of the ranks on host `source`, by rank and the peer rank on the other host."""
    arrived: dict[tuple[int, int], Part] = field(default_factory=dict)
    """Reports of the ranks on host `target` about the bytes that they have received, by rank and the peer rank on the
    other host."""
    _marks: deque[Mark] = field(default_factory=deque)

    @property
    def sent(self) -> int:
        return self._total("sent")

    @property
    def resent(self) -> int:
        return self._total("resent")

    @property
    def busy(self) -> float:
        return max((part.total("busy") for part in self.parts.values()), default=0.0)

    def _total(self, name: str) -> int:
        return int(sum(part.total(name) for part in self.parts.values()))

    @property
    def _newest(self) -> Mapping[str, float]:
        """The last report of the rank that has sent the most bytes over this link."""
        return max((part.last for part in self.parts.values()), key=itemgetter("sent"))

    def mark(self, now: float) -> None:
        if self._marks and now - self._marks[-1].seen < MARK_SECONDS:
            return
        self._marks.append(Mark(now, self.sent, self.resent, self.busy, self._newest["round_trip"]))
        while len(self._marks) > 2 and self._marks[1].seen < now - WINDOW_SECONDS:
            self._marks.popleft()

    def recent(self, now: float) -> Recent:
        """Return the traffic on the link during the last seconds; zeros if no report has arrived lately."""
        first, last = self._marks[0], self._marks[-1]
        # A step may take longer than the window, and reports come only after a step.
        if now - last.seen > max(WINDOW_SECONDS, 2 * (last.seen - first.seen)):
            return Recent(0.0, 0, 0, 0.0)
        sums = (last.sent - first.sent, last.resent - first.resent, last.busy - first.busy)
        round_trip = statistics.fmean(mark.round_trip for mark in self._marks)
        return Recent(last.seen - first.seen, *sums, round_trip)

    def describe(self, now: float) -> dict[str, Any]:
        recent, overall = self.recent(now), Recent(0.0, self.sent, self.resent, self.busy)
        return {
            "source": self.source,
            "target": self.target,
            "sent": self.sent,
            "received": int(sum(part.total("received") for part in self.arrived.values())),
            "resent": self.resent,
            "resent_ratio": overall.resent_ratio,
            "rate": overall.rate,
            "recent_rate": recent.rate,
            "round_trip": self._newest["round_trip"],
            "queued": int(sum(part.last["queued"] for part in self.parts.values())),
        }


class HostLinks:
    """The links between all pairs of hosts that have carried bytes."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._links: dict[tuple[str, str], HostLink] = {}

    def hear(self, rank: int, told: Sequence[Mapping[str, Any]], now: float) -> None:
        """Record a rank's report about its links. Links to ranks that do not exist are ignored."""
        here = self._members[rank].host
        for row in told:
            key = rank, row["peer"]
            there = self._members[row["peer"]].host if row["peer"] < len(self._members) else here
            if there == here:
                continue
            link = self._link(here, there)
            link.parts.setdefault(key, Part()).hear(row)
            link.mark(now)
            self._link(there, here).arrived.setdefault(key, Part()).hear(row)

    def _link(self, source: str, target: str) -> HostLink:
        return self._links.setdefault((source, target), HostLink(source, target))

    def __bool__(self) -> bool:
        return bool(self._links)

    @property
    def most(self) -> list[HostLink]:
        """At most MOST_SHOWN links, those that have carried the most bytes, sorted by name."""
        links = [link for link in self._links.values() if link.parts]
        return sorted(sorted(links, key=attrgetter("sent"))[-MOST_SHOWN:], key=attrgetter("source", "target"))

    def describe(self, now: float) -> list[dict[str, Any]]:
        return [link.describe(now) for link in self.most]

    def recent(self, now: float) -> dict[tuple[str, str], Recent]:
        """Return the traffic on each link during the last seconds, by the names of the link's two hosts."""
        return {name: link.recent(now) for name, link in self._links.items() if link.parts}


def rate_text(rate: float) -> str:
    """Return bits per second as text, such as 94 Mbit/s."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if rate >= size:
            return f"{rate / size:.1f} {unit}" if rate < 10 * size else f"{rate / size:.0f} {unit}"
    return f"{rate / 1e3:.0f} kbit/s"


def share_text(share: float) -> str:
    return f"{100 * share:.1f} %"
