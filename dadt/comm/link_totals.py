"""Counts the bytes that a rank's TCP connections with other hosts carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dadt._core import LinkCounts

TELL_SECONDS = 1.0
"""Shortest time in seconds between two of a rank's reports about its links to the launcher."""
MOST_TOLD = 8
"""Largest number of links in a report: those that carried most bytes since they were last reported."""
MOST_AT_END = 256
"""Largest number of links in a rank's last report."""


class LinkTotals(NamedTuple):
    """Traffic totals, so far, of all connections of this rank with the ranks of one other host."""

    sent: int = 0
    """Bytes that this rank has sent and the other host has received."""
    received: int = 0
    resent: int = 0
    """Bytes that TCP has sent more than once, counted each further time."""
    busy: float = 0.0
    """Seconds in which bytes were in flight and the other host was able to receive more, so that the receiver did not
    limit the rate."""
    round_trip: float = 0.0
    """Round trip time in seconds, at the last reading."""
    queued: int = 0
    """Bytes that waited in the kernel to be sent, at the last reading."""
    at: float = 0.0
    """Time of the last reading (perf_counter)."""

    @property
    def moved(self) -> int:
        return self.sent + self.received

    def beside(self, other: LinkTotals) -> LinkTotals:
        """Return these totals plus those of connections that are used at the same time, whose busy seconds may
        overlap."""
        most = max(self, other, key=lambda totals: totals.sent)
        sums = (self.sent + other.sent, self.received + other.received, self.resent + other.resent)
        queued, at = self.queued + other.queued, max(self.at, other.at)
        return LinkTotals(*sums, max(self.busy, other.busy), most.round_trip, queued, at)

    def after(self, before: LinkTotals) -> LinkTotals:
        """Return these totals plus those of earlier connections that these connections have replaced."""
        sums = (self.sent + before.sent, self.received + before.received, self.resent + before.resent)
        return LinkTotals(*sums, self.busy + before.busy, self.round_trip, self.queued, max(self.at, before.at))


class Counting(Protocol):
    """Interface of an object that counts the bytes of a rank's connections. `counts` returns one entry for each rank of
    the group."""

    def counts(self) -> list[LinkCounts]: ...


Links = Callable[[], Mapping[int, LinkTotals]]
"""Function that returns the traffic totals for each other host. A key is the number of one rank on that host."""


def by_host(counting: Sequence[Counting], stands: Sequence[int | None]) -> Links:
    """Return a function that adds up the totals of these connections for each host. stands: for each rank of the group,
    the rank that stands for its host as a key of the result; None for ranks on this host."""

    def read() -> Mapping[int, LinkTotals]:
        counts = [zip(stands, each.counts(), strict=True) for each in counting]
        return together((rank, _totals(count)) for pairs in counts for rank, count in pairs if rank is not None)

    return read


def together(links: Iterable[tuple[int, LinkTotals]]) -> dict[int, LinkTotals]:
    """Add up, for each host, the totals of connections that are used at the same time. links: pairs of a rank that
    stands for a host, and totals."""
    sums: dict[int, LinkTotals] = {}
    for rank, totals in links:
        sums[rank] = sums[rank].beside(totals) if rank in sums else totals
    return sums


def renumbered(read: Links, ranks: Sequence[int]) -> Links:
    """Return the function `read` with keys converted to ranks' numbers in the whole job. ranks: these numbers, by index
    in the group."""
    return lambda: {ranks[place]: totals for place, totals in read().items()}


def _after(now: Mapping[int, LinkTotals], before: Mapping[int, LinkTotals]) -> dict[int, LinkTotals]:
    none = LinkTotals()
    return {rank: now.get(rank, none).after(before.get(rank, none)) for rank in {**before, **now}}


def _told(totals: LinkTotals) -> dict[str, Any]:
    """Return the totals to report to the launcher, without the time of reading, since clocks differ between hosts."""
    return {name: value for name, value in totals._asdict().items() if name != "at"}


def _totals(counts: LinkCounts) -> LinkTotals:
    return LinkTotals(*(getattr(counts, name) for name in LinkTotals._fields))


class LinkRecord:
    """Totals of one rank's links with other hosts since the job began, over all connections so far."""

    def __init__(self) -> None:
        self._told: dict[int, LinkTotals] = {}
        self._due = float("-inf")
        self._counted: tuple[Mapping[int, LinkTotals], Mapping[object, Links]] = {}, {}
        """Totals of connections that have ended, and functions that return the totals of open ones. The pair is
        replaced as a whole, because another thread may read it."""

    def begin(self, name: object, read: Links) -> None:
        """Count the bytes of a connection, which takes the place of an earlier one of the same name."""
        self.end(name)
        ended, open = self._counted
        self._counted = ended, {**open, name: read}

    def end(self, name: object) -> None:
        """Forget a closed connection; its totals stay counted."""
        ended, open = self._counted
        if name in open:
            others = {each: read for each, read in open.items() if each != name}
            self._counted = _after(open[name](), ended), others

    def totals(self) -> Mapping[int, LinkTotals]:
        """Return the traffic totals for each other host. A key is the number of one rank on that host."""
        ended, open = self._counted
        return _after(together(link for read in open.values() for link in read().items()), ended)

    def news(self, now: float, last: bool = False) -> list[dict[str, Any]]:
        """Return the totals of links to report to the launcher. The list is empty if the last report is less than
        TELL_SECONDS old, which bounds the number of reports. now: seconds of a monotonic clock. last: whether this is
        the rank's last report."""
        if now < self._due and not last:
            return []
        self._due = now + TELL_SECONDS
        totals = self.totals()
        moved = {rank: each.moved - self._told.get(rank, LinkTotals()).moved for rank, each in totals.items()}
        most = sorted(filter(moved.__getitem__, moved), key=moved.__getitem__, reverse=True)
        most = most[: MOST_AT_END if last else MOST_TOLD]
        self._told |= {rank: totals[rank] for rank in most}
        return [{"peer": rank, **_told(totals[rank])} for rank in most]
