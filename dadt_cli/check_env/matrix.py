"""Judges the round trips and speeds that were measured between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dadt_cli.check_env.check import Check, fail, good, warn
from dadt_cli.check_env.pairs import HostPair

SLOW_SECONDS = 5e-3
"""Seconds above which a round trip counts as slow: hosts at one site need less than 1 ms."""
JITTER_SECONDS = 2e-3
ENOUGH = 0.5
"""Share of the slower network card's speed that the measured speed between two hosts should reach."""
SHOWN = 6
"""Most pairs of hosts that one line of output names."""


def judged(ways: Sequence[HostPair], names: Sequence[str], links: Sequence[float]) -> list[Check]:
    """Return checks of the measurements between hosts. names: names of all hosts. links: bits per second of each host's
    network card; 0 if unknown."""
    found = []
    if failed := [way for way in ways if way.error]:
        listed = _listed([f"{_pair(way, names)}: {way.error}" for way in failed])
        hint = "let all of TCP pass between them; if only large packets are lost: one MTU on all hosts and switches"
        found.append(fail("pairs", listed, hint))
    trips = [(way.seconds, _pair(way, names)) for way in ways if way.seconds is not None]
    if trips:
        jitters = [(way.jitter, _pair(way, names)) for way in ways if way.jitter is not None]
        found += [_trip(sorted(trips, reverse=True)), _jitter(sorted(jitters, reverse=True))]
    speeds = [(way.speed, way.source, way.target) for way in ways if way.speed is not None]
    if speeds:
        found.append(_speed(sorted(speeds), names, links))
    return found


def as_pairs(ways: Sequence[HostPair], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the measurements as entries for the JSON output: for each pair the names of the two hosts, and all
    measured values."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for way in sorted(ways, key=lambda way: (way.source, way.target)):
        entry = found.setdefault((way.source, way.target), {"from": names[way.source], "to": names[way.target]})
        if way.seconds is not None and way.jitter is not None:
            entry |= {"round_trip_ms": round(1e3 * way.seconds, 4), "jitter_ms": round(1e3 * way.jitter, 4)}
        if way.speed is not None:
            entry["gbit_per_s"] = round(8e-9 * way.speed, 4)
        if way.error:
            entry["error"] = way.error
    return list(found.values())


def _trip(trips: Sequence[tuple[float, str]]) -> Check:
    """Check the round trips between hosts. trips: seconds and names of each pair, the slowest first."""
    if slow := [f"{_ms(seconds)} ms {pair}" for seconds, pair in trips if seconds > SLOW_SECONDS]:
        hint = "far apart, or a full line between them: sync waits so long at each step, pipe and local less"
        return warn("round trip", _listed(slow), hint)
    longest = f", longest {trips[0][1]}" if len(trips) > 1 else ""
    return good("round trip", f"{_range(_ms(trips[-1][0]), _ms(trips[0][0]))} ms{longest}")


def _jitter(jitters: Sequence[tuple[float, str]]) -> Check:
    """Check the jitter of round trips between hosts. jitters: seconds and names of each pair, the most jitter first."""
    if unsteady := [f"{_ms(seconds)} ms {pair}" for seconds, pair in jitters if seconds > JITTER_SECONDS]:
        hint = "something else loads these hosts or the network: end it, or use cables in place of Wi-Fi and VPN"
        return warn("jitter", _listed(unsteady), hint)
    return good("jitter", f"{_range(_ms(jitters[-1][0]), _ms(jitters[0][0]))} ms")


def _speed(speeds: Sequence[tuple[float, int, int]], names: Sequence[str], links: Sequence[float]) -> Check:
    """Check the speeds between hosts against their network cards. speeds: bytes per second, and the indices of the
    sending and the receiving host, the slowest first."""
    slow = []
    for speed, source, target in speeds:
        link = min(links[source], links[target])
        if link and 8 * speed < ENOUGH * link:
            slow.append(f"{_gbit(speed)} Gbit/s of {link / 1e9:g} from {names[source]} to {names[target]}")
    if slow:
        hint = "does something else use it? `ethtool` of both cards and the switch's port may tell another speed"
        return warn("bandwidth", _listed(slow), hint)
    known = sorted({link / 1e9 for link in links if link})
    cards = f", cards of {' and '.join(f'{speed:g}' for speed in known)} Gbit/s" if known else ", cards tell no speed"
    return good("bandwidth", f"{_range(_gbit(speeds[0][0]), _gbit(speeds[-1][0]))} Gbit/s{cards}")


def _pair(way: HostPair, names: Sequence[str]) -> str:
    return f"{names[way.source]}-{names[way.target]}"


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more (--json shows all)" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _gbit(speed: float) -> str:
    return f"{8e-9 * speed:.3g}"
