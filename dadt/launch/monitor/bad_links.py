"""Finds links between hosts that slow down the averaging of gradients, so that the user can be warned."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from dadt.launch.monitor.host_links import Recent, rate_text, share_text

BUSY = 0.25
"""A link counts as slowing down the averaging only if bytes are in flight on it for at least this share of the time."""
WAITING = 0.1
"""A link counts as slowing down the averaging only if ranks wait for at least this share of the time."""
LASTING_SECONDS = 10.0
"""Seconds for which a link must slow down the averaging before the user is warned."""
MOST_TOLD = 3
"""Largest number of links that one warning names."""

SLOW = 3.0
"""A link counts as slow if a quarter of the other links have at least this many times its rate."""
LOSSY = 0.005
"""A link counts as lossy only if at least this share of its bytes is sent again. Full queues cause as many losses in a
sound network, so a lossy link must also lose a far larger share than the best quarter of the other links and be slower,
or carry so little that no queue can be full."""
LOSSIER, SLOWER = 4.0, 4 / 3
LEAST_RESENT = 64 << 10
UNDER_WAY = 64 << 10
"""Number of bytes in flight to or from a host that every sound network can hold without loss."""

Pair = tuple[str, str]


class BadLinks:
    """Finds slow and lossy links between hosts, and reports each of them once."""

    def __init__(self) -> None:
        self._since: dict[Pair, float] = {}
        self._told: set[Pair] = set()

    def find(self, links: Mapping[Pair, Recent], waiting: float, now: float) -> str:
        """Return a warning about links that have slowed down the averaging for some seconds; usually empty.

        links: the traffic of each link in the last seconds. waiting: share of the time that ranks wait for averages.
        """
        texts = []
        bad = self._bad(links) if waiting >= WAITING else {}
        self._since = {pair: self._since.get(pair, now) for pair in bad}
        for pair, since in self._since.items():
            if now - since >= LASTING_SECONDS and pair not in self._told:
                self._told.add(pair)
                texts.append((links[pair].rate or 0.0, f"{pair[0]} to {pair[1]}: {bad[pair]}"))
        if not texts:
            return ""
        named = "; ".join(text for _, text in sorted(texts)[:MOST_TOLD])
        more = f"; and {len(texts) - MOST_TOLD} more" if len(texts) > MOST_TOLD else ""
        return f"{named}{more}; ranks wait {100 * waiting:.0f} % of the time for averages"

    def _bad(self, links: Mapping[Pair, Recent]) -> dict[Pair, str]:
        """Return for each bad link, identified by its pair of hosts, a text that describes it."""
        bulk = {pair: link for pair, link in links.items() if link.rate is not None}
        rates = sorted(link.rate or 0.0 for link in bulk.values())
        ratios = sorted(link.resent_ratio for link in bulk.values())
        leaving, coming = Counter[str](), Counter[str]()
        for (source, target), link in links.items():
            leaving[source] += round(link.under_way)
            coming[target] += round(link.under_way)
        found = {}
        for pair, link in bulk.items():
            if link.rate is None or link.busy < BUSY * link.seconds:
                continue
            usual = _quartile(rates, link.rate, 3)
            is_slow = usual >= SLOW * link.rate
            fits = max(leaving[pair[0]], coming[pair[1]]) <= UNDER_WAY
            stands_out = link.resent_ratio >= LOSSIER * _quartile(ratios, link.resent_ratio, 1)
            is_held = stands_out and usual >= SLOWER * link.rate
            is_lossy = link.resent_ratio >= LOSSY and link.resent >= LEAST_RESENT and (fits or is_held)
            if is_slow or is_lossy:
                others = f" (other links: {rate_text(usual)})" if usual >= SLOWER * link.rate else ""
                found[pair] = f"{rate_text(link.rate)}, {share_text(link.resent_ratio)} sent again{others}"
        return found


def _quartile(values: Sequence[float], own: float, quarters: int) -> float:
    """Return the lower quartile (quarters: 1) or upper quartile (3) of the sorted values, without one value that equals
    `own`; 0 if there are no others."""
    if len(values) < 2:
        return 0.0
    at = (len(values) - 1) * quarters // 4
    return values[at if at < bisect_left(values, own) else at + 1]
