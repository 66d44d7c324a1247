"""Counts what a rank's TCP connections with other hosts carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dadt._core import LinkCounts

TELL_SECONDS = 1.0
"""Least seconds between two reports of links."""
MOST_TOLD = 8
"""Most links in a report: those that have carried most since they were last reported."""
MOST_AT_END = 256
"""Most links in a rank's last report."""


class LinkTotals(NamedTuple):
    """What connections with ranks of one other host have carried so far."""

    sent: int = 0
    """Bytes of this rank that have arrived there."""
    received: int = 0
    resent: int = 0
    """Bytes that were sent again."""
    busy: float = 0.0
    """Seconds in which bytes were under way and the other host had room for more."""
    round_trip: float = 0.0
    """Seconds, at the last reading."""
    queued: int = 0
    """Bytes that waited in the kernel to be sent, at the last reading."""
    at: float = 0.0
    """Time of the last reading (perf_counter)."""

    @property
    def moved(self) -> int:
        return self.sent + self.received

    def beside(self, other: LinkTotals) -> LinkTotals:
        """Return the totals of both, which are used at the same time: their busy seconds may overlap."""
        most = max(self, other, key=lambda totals: totals.sent)
        sums = (self.sent + other.sent, self.received + other.received, self.resent + other.resent)
        queued, at = self.queued + other.queued, max(self.at, other.at)
        return LinkTotals(*sums, max(self.busy, other.busy), most.round_trip, queued, at)

    def after(self, before: LinkTotals) -> LinkTotals:
        """Return the totals of both, of which this one has taken the place of the other."""
        sums = (self.sent + before.sent, self.received + before.received, self.resent + before.resent)
        return LinkTotals(*sums, self.busy + before.busy, self.round_trip, self.queued, max(self.at, before.at))


class Counting(Protocol):
    """What counts its connections, by place of the other rank."""

    def counts(self) -> list[LinkCounts]: ...


Links = Callable[[], Mapping[int, LinkTotals]]
"""Function that returns the totals for each other host, by a rank that stands for the host."""


def by_host(counting: Sequence[Counting], stands: Sequence[int | None]) -> Links:
    """Return the Links of these connections. stands: for each place the rank that stands for its host; None for places
    on this host."""

    def read() -> Mapping[int, LinkTotals]:
        counts = [zip(stands, each.counts(), strict=True) for each in counting]
        return together((rank, _totals(count)) for pairs in counts for rank, count in pairs if rank is not None)

    return read


def together(links: Iterable[tuple[int, LinkTotals]]) -> dict[int, LinkTotals]:
    """Sum links that are used at the same time, by the ranks that stand for their hosts."""
    sums: dict[int, LinkTotals] = {}
    for rank, totals in links:
        sums[rank] = sums[rank].beside(totals) if rank in sums else totals
    return sums


def renumbered(read: Links, ranks: Sequence[int]) -> Links:
    """Return Links by the numbers that ranks have in the whole job, in place of their places in `ranks`."""
    return lambda: {ranks[place]: totals for place, totals in read().items()}


def _after(now: Mapping[int, LinkTotals], before: Mapping[int, LinkTotals]) -> dict[int, LinkTotals]:
    none = LinkTotals()
    return {rank: now.get(rank, none).after(before.get(rank, none)) for rank in {**before, **now}}


def _told(totals: LinkTotals) -> dict[str, Any]:
    """Return what the launcher is told of a link; the time would be that of another host's clock."""
    return {name: value for name, value in totals._asdict().items() if name != "at"}


def _totals(counts: LinkCounts) -> LinkTotals:
    return LinkTotals(*(getattr(counts, name) for name in LinkTotals._fields))


class LinkRecord:
    """What one rank's links with other hosts have carried since the job began, over all connections so far."""

    def __init__(self) -> None:
        self._told: dict[int, LinkTotals] = {}
        self._due = float("-inf")
        self._counted: tuple[Mapping[int, LinkTotals], Mapping[object, Links]] = {}, {}
        """Totals of connections that have ended, and what reads those of each open one; replaced at once, as another
        thread may read."""

    def begin(self, name: object, read: Links) -> None:
        """Count what a connection carries, in place of an earlier one of this name."""
        self.end(name)
        ended, open = self._counted
        self._counted = ended, {**open, name: read}

    def end(self, name: object) -> None:
        """Let go of a connection that has been closed; what it has carried stays counted."""
        ended, open = self._counted
        if name in open:
            others = {each: read for each, read in open.items() if each != name}
            self._counted = _after(open[name](), ended), others

    def totals(self) -> Mapping[int, LinkTotals]:
        """Return the totals for each other host, by a rank that stands for the host."""
        ended, open = self._counted
        return _after(together(link for read in open.values() for link in read().items()), ended)

    def news(self, now: float, last: bool = False) -> list[dict[str, Any]]:
        """Return what the launcher is to be told; empty if it was told less than a second ago, so that the amount is
        bounded. now: seconds of a monotonic clock. last: whether this is the rank's last report."""
        if now < self._due and not last:
            return []
        self._due = now + TELL_SECONDS
        totals = self.totals()
        moved = {rank: each.moved - self._told.get(rank, LinkTotals()).moved for rank, each in totals.items()}
        most = sorted(filter(moved.__getitem__, moved), key=moved.__getitem__, reverse=True)
        most = most[: MOST_AT_END if last else MOST_TOLD]
        self._told |= {rank: totals[rank] for rank in most}
        return [{"peer": rank, **_told(totals[rank])} for rank in most]
