"""Writes the section of docs/results/speed.md about peers: targets, whether they are reached, and all figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.page import spread, table
from benchmarks.peers.measurement import MEASUREMENTS
from benchmarks.peers.target import (
    BARE,
    BY_HAND,
    DDP,
    HOROVOD,
    PLAIN,
    TARGETS,
    Target,
    fastest,
    seconds,
    speed,
    verdict,
)
from dadt_cli.bench.ratio import Interval, interval

Found = Mapping[str, Mapping[str, Any]]
QUIET = 10.0
"""Percentage of the processors that other programs may use before a measurement."""
KNOWN = {DDP: "DDP's", HOROVOD: "Horovod's", PLAIN: "plain's", BY_HAND: "the best choice's by hand"}
AGAINST = {"/ plain": PLAIN, "/ DDP": DDP, "/ Horovod": HOROVOD, **{f"/ {bare[0]}": bare for bare in BARE.values()}}


def page(found: Found, slow: Found) -> str:
    """Return the text of the section. slow: figures of `benchmarks.convergence.slow_link`."""
    return "\n".join(filter(None, [_busy(found), _targets({**found, **slow}), _slow(slow), _figures(found)]))


def _busy(found: Found) -> str:
    busy = {name: each["conditions"]["busy"] for name, each in found.items() if each["conditions"]["busy"] > QUIET}
    shares = ", ".join(f"{share:.0f} % before {name}" for name, share in busy.items())
    if not busy:
        return ""
    return (
        f"**The machine did other work meanwhile: these figures are no results.** Processors in use just before a\n"
        f"measurement began: {shares}.\n"
    )


def _targets(found: Found) -> str:
    lines = []
    for target in TARGETS:
        if target.measurement not in found and target.optional:
            continue
        value = _value(target, found)
        bound = _value(target._replace(mine=BARE.get(target.mine, ("",))[0]), found)
        most = "" if bound is None else f"{bound.median:.2f}"
        lines.append([_words(target), f"{target.least:.2f}", most, _told(value), verdict(target, value)])
    return table(["", "at least", "bare", "measured", "reached"], lines)


def _slow(slow: Found) -> str:
    ratios = [ratio for each in slow.values() for ratio in each["ratios"]]
    if not ratios:
        return ""
    return (
        f"Over the slow link (100 Mbit/s) a step of DDP waits {min(ratios):.0f} to {max(ratios):.0f} times as long\n"
        "as it computes. The times are those to the same loss, with `--algorithm auto --compression auto` and nothing\n"
        "else, for a perceptron of 0.24 million weights; each round is a training with a seed of its own\n"
        "(`slow-link-sgd.json`, `slow-link-adam.json`).\n"
    )


def _value(target: Target, found: Found) -> Interval | None:
    if target.measurement not in found:
        return None
    return speed(found[target.measurement], target.mine, target.others, target.limited)


def _words(target: Target) -> str:
    other = KNOWN.get(target.others, f"that of {target.others[0]}")
    limit = ", or what the link allows" if target.limited else ""
    return f"{target.measurement}: speed of {target.mine} over {other}{limit}"


def _told(value: Interval | None) -> str:
    return "" if value is None else spread(value.median, value.low, value.high)


def _figures(found: Found) -> str:
    """Return a table with a line for each contender of each measurement."""
    lines = []
    for name in filter(found.__contains__, MEASUREMENTS):
        measurement = found[name]
        for contender, each in measurement["contenders"].items():
            step = interval([1e3 * value for value in seconds(measurement, contender)])
            ratios = [
                "1" if fastest(measurement, others) == contender else _told(speed(measurement, contender, others))
                for others in AGAINST.values()
            ]
            shown = spread(step.median, step.low, step.high, ".4g")
            lines.append([name, contender, shown, *ratios, f"{each['memory'] / 1e6:,.0f}"])
    return table(["measurement", "contender", "ms a step", *AGAINST, "MB a process"], lines)
