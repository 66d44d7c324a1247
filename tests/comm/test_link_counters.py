"""What a rank's links carry, as counters of its timeline."""

from __future__ import annotations

import json
from time import perf_counter

from dadt.comm.link_totals import LinkTotals
from dadt.comm.trace.links import LinkCounters


def test_a_rate_is_of_the_time_between_two_readings() -> None:
    """Not of that between two looks at them; and no rate is told of two readings that are nearly one."""
    begin = perf_counter()
    links = {1: LinkTotals(), 2: LinkTotals(at=begin)}
    counters = LinkCounters(lambda: links, 0, begin)

    def shown() -> dict[str, float]:
        events = [json.loads(line.rstrip(",")) for line in counters.drain().decode().splitlines()]
        return {event["name"][-1]: event["args"]["Mbit/s sent"] for event in events}

    links[1] = LinkTotals(sent=10_000_000, at=begin + 2.0)
    first = shown()
    assert first.keys() == {"1"} and 39 < first["1"] < 41
    assert shown() == {}
    links[1] = LinkTotals(sent=20_000_000, at=begin + 2.01)
    assert shown() == {}
    links[1] = LinkTotals(sent=20_000_000, at=begin + 3.0)
    assert shown() == {"1": 80.0}
    links[1] = LinkTotals(sent=20_000_000, at=begin + 4.0)
    assert shown() == {"1": 0.0}
    links[1] = LinkTotals(sent=20_000_000, at=begin + 5.0)
    assert shown() == {}
