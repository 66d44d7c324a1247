"""Writes the sentence that sums up a training benchmark, and the legend of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dadt_cli.bench.ratio import Interval

if TYPE_CHECKING:
    from dadt_cli.bench.training import TrainingRow

LEGEND = (
    ("UNIT/s", "of all workers together"),
    ("per rank", "of the slowest and of the fastest rank"),
    ("scaling", "the rate, as a share of as many copies that exchange nothing (plain)"),
    ("exposed", "share of a step in which it waits for communication: what it is longer than under null, the limit"),
    ("/ NAME", "how many times as fast as NAME"),
    ("MB", "the most memory that a worker has used"),
    ("beyond plain", "processor time that plain does not need"),
    ("transport", "processor time of the threads that move data between workers, and add it up"),
)


def reference(rows: Sequence[TrainingRow]) -> TrainingRow:
    """Return the row of the contender that all other contenders are compared with, so that its relative speed is
    exactly 1."""
    return next((row for row in rows if row.speed.low == row.speed.high == 1.0), rows[0])


def legend(first: str, unit: str) -> str:
    """Return a line of explanation for each column. first: name of the contender that other contenders are compared
    with. unit: unit of the rate, such as images."""
    text = "\n".join(f"{name}: {meaning}" for name, meaning in LEGEND)
    return text.replace("NAME", first).replace("UNIT", unit)


def conclusion(rows: Sequence[TrainingRow]) -> str:
    """Return a sentence that compares the reference contender with all other contenders; empty if there is nothing to
    compare."""
    first = reference(rows)
    found = [_beside(first.name, row) for row in rows if row is not first and _is_rival(row, first)]
    if first.exposed is not None:
        share = max(0.0, first.exposed.median)
        found.append(f"{first.name} waits for communication in {share:.0%} of a step")
    return "; ".join(found) + "." if found else ""


def _is_rival(row: TrainingRow, first: TrainingRow) -> bool:
    """Return whether the contender of `row` can be compared with the contender `first`: whether both exchange data, so
    that `row` is neither plain copies of the script nor the null executor."""
    return first.ranks > 1 and row.name != "plain" and "null" not in row.options


def _beside(name: str, other: TrainingRow) -> str:
    speed = Interval(1 / other.speed.median, 1 / other.speed.high, 1 / other.speed.low)
    interval = f"({speed.low:.2f} to {speed.high:.2f})"
    if speed.low <= 1.0 <= speed.high:
        return f"{name} and {other.name} are as fast as each other, as far as this shows {interval}"
    return f"{name} is {speed.median:.2f} times as fast as {other.name} {interval}"
