"""Shows the traffic of a rank's links with other hosts in the timeline, as counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import perf_counter

from dadt.comm.link_totals import LinkTotals

LEAST_SECONDS = 0.2
"""Shortest time in seconds between the two readings from which a rate is computed, because acknowledgments arrive in
bursts."""
REST_SECONDS = 0.5
"""Seconds without a new reading after which a link counts as idle; links in use are read more often."""
MOST_LINKS = 8
"""Largest number of links shown at a time: those that carried most bytes since the last call of `drain`."""


class LinkCounters:
    """Counters of one rank's links, for its part of the timeline."""

    def __init__(self, totals: Callable[[], Mapping[int, LinkTotals]], rank: int, origin: float) -> None:
        """totals: returns the traffic totals for each other host, keyed by the number of a rank on it. origin: time 0
        of the timeline (perf_counter)."""
        self._totals, self._rank, self._origin = totals, rank, origin
        self._before: Mapping[int, LinkTotals] = {}
        self._shown: set[int] = set()
        self._begin = perf_counter()

    def drain(self) -> bytes:
        """Return lines of a trace with the rate of each link since the last call. A link that has become idle gets one
        line with zeros."""
        totals, now = dict(self._totals()), perf_counter()
        read = {peer: each for peer, each in totals.items() if each.at - self._earlier(peer).at >= LEAST_SECONDS}
        moved = {peer: each.moved - self._earlier(peer).moved for peer, each in read.items()}
        most = sorted(filter(moved.__getitem__, moved), key=moved.__getitem__)[-MOST_LINKS:]
        resting = {peer for peer in self._shown - {*most} if peer in read or now - totals[peer].at > REST_SECONDS}
        lines = [self._line(peer, totals[peer], self._earlier(peer), now) for peer in sorted({*most, *resting})]
        self._before, self._shown = {**self._before, **read}, {*most, *self._shown} - resting
        return b"".join(lines)

    def _earlier(self, peer: int) -> LinkTotals:
        return self._before.get(peer, LinkTotals(at=self._begin))

    def _line(self, peer: int, totals: LinkTotals, before: LinkTotals, now: float) -> bytes:
        at = totals.at if totals.at > before.at else now
        seconds = at - before.at
        values = {
            "Mbit/s sent": round(8e-6 * (totals.sent - before.sent) / seconds, 3),
            "Mbit/s sent again": round(8e-6 * (totals.resent - before.resent) / seconds, 3),
            "Mbit/s received": round(8e-6 * (totals.received - before.received) / seconds, 3),
        }
        event = {"ts": round(1e6 * (at - self._origin), 3), "ph": "C", "pid": self._rank, "tid": 0, "cat": "link"}
        event |= {"name": f"to the host of rank {peer}", "args": values}
        return json.dumps(event, separators=(",", ":")).encode() + b",\n"
