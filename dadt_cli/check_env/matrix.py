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
    """Return checks of the measurements between hosts. names: of all hosts. links: bits per second of each host's
    network card; 0 if unknown."""
    found = []
    if failed := [way for way in ways if way.error]:
        listed = _listed([f"{_pair(way, names)}: {way.error}" for way in failed])
        hint = "let all of TCP pass between them; if only large packets are lost: one MTU on all hosts and switches"
        found.append(fail("pairs", listed, hint))
    trips = sorted((way for way in ways if way.seconds is not None), key=lambda way: -(way.seconds or 0.0))
    if trips:
        found += [_trip(trips, names), _jitter(sorted(trips, key=lambda way: -(way.jitter or 0.0)), names)]
    if speeds := sorted((way for way in ways if way.speed is not None), key=lambda way: way.speed or 0.0):
        found.append(_speed(speeds, names, links))
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


def _trip(trips: Sequence[HostPair], names: Sequence[str]) -> Check:
    """Check the round trips between hosts. trips: measurements, the slowest first."""
    slow = [way for way in trips if (way.seconds or 0.0) > SLOW_SECONDS]
    value = _range([_ms(way.seconds) for way in reversed(trips)])
    if slow:
        hint = "far apart, or a full line between them: sync waits so long at each step, pipe and local less"
        listed = _listed([f"{_ms(way.seconds)} ms {_pair(way, names)}" for way in slow])
        return warn("round trip", listed, hint)
    return good("round trip", f"{value} ms" + (f", longest {_pair(trips[0], names)}" if len(trips) > 1 else ""))


def _jitter(trips: Sequence[HostPair], names: Sequence[str]) -> Check:
    """Check the jitter of round trips between hosts. trips: measurements, the one with the most jitter first."""
    value = _range([_ms(way.jitter) for way in reversed(trips)])
    unsteady = [way for way in trips if (way.jitter or 0.0) > JITTER_SECONDS]
    if unsteady:
        hint = "something else loads these hosts or the network: end it, or use cables in place of Wi-Fi and VPN"
        return warn("jitter", _listed([f"{_ms(way.jitter)} ms {_pair(way, names)}" for way in unsteady]), hint)
    return good("jitter", f"{value} ms")


def _speed(speeds: Sequence[HostPair], names: Sequence[str], links: Sequence[float]) -> Check:
    """Check the speeds between hosts against their network cards. speeds: measurements, the slowest first."""
    slow = []
    for way in speeds:
        link = min(links[way.source], links[way.target])
        if link and 8 * (way.speed or 0.0) < ENOUGH * link:
            slow.append(f"{_gbit(way)} Gbit/s of {link / 1e9:g} from {names[way.source]} to {names[way.target]}")
    if slow:
        hint = "does something else use it? `ethtool` of both cards and the switch's port may tell another speed"
        return warn("bandwidth", _listed(slow), hint)
    value = f"{_range([_gbit(way) for way in speeds])} Gbit/s"
    known = sorted({link / 1e9 for link in links if link})
    cards = f", cards of {' and '.join(f'{speed:g}' for speed in known)} Gbit/s" if known else ", cards tell no speed"
    return good("bandwidth", value + cards)


def _pair(way: HostPair, names: Sequence[str]) -> str:
    return f"{names[way.source]}-{names[way.target]}"


def _range(sorted_values: Sequence[str]) -> str:
    low, high = sorted_values[0], sorted_values[-1]
    return low if low == high else f"{low} to {high}"


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more (--json shows all)" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def _ms(seconds: float | None) -> str:
    return f"{1e3 * (seconds or 0.0):.3g}"


def _gbit(way: HostPair) -> str:
    return f"{8e-9 * (way.speed or 0.0):.3g}"
