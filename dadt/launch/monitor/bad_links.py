"""Decides which links between hosts are told to the user, as they hold up the averaging."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from dadt.launch.monitor.host_links import Recent, rate_text, share_text

BUSY = 0.25
"""Least share of the time in which bytes are under way on a link that holds up the averaging."""
WAITING = 0.1
"""Least share of the time that ranks wait while a link holds up the averaging."""
LASTING_SECONDS = 10.0
"""Seconds after which a link that holds up the averaging is told."""
MOST_TOLD = 3
"""Most links that one message names."""

SLOW = 3.0
"""A link is slow if a quarter of the others have at least this many times its rate."""
LOSSY = 0.005
"""Least share of a lossy link's bytes that are sent again. Full queues lose as much on a sound network, so a lossy link
also loses far more than a quarter of the others and is slower, or has no queue that could be full."""
LOSSIER, SLOWER = 4.0, 4 / 3
LEAST_RESENT = 64 << 10
UNDER_WAY = 64 << 10
"""Most bytes under way to a host, and from one, that every sound network has room for."""

Pair = tuple[str, str]


class BadLinks:
    """Finds slow and lossy links, and names each of them once."""

    def __init__(self) -> None:
        self._since: dict[Pair, float] = {}
        self._told: set[Pair] = set()

    def find(self, links: Mapping[Pair, Recent], waiting: float, now: float) -> str:
        """Return a text for the user about links that have held up the averaging for some seconds; mostly empty.

        links: what each link has carried in the last seconds. waiting: share of the time that ranks wait for averages.
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
        """Return what to say of each bad link."""
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
    """Return a quartile of sorted values without one that equals `own`; 0 if there are no others."""
    if len(values) < 2:
        return 0.0
    at = (len(values) - 1) * quarters // 4
    return values[at if at < bisect_left(values, own) else at + 1]
