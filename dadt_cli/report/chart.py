"""Computes the geometry of charts: lines over time, and distributions. An HTML template draws them in any width and
colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dadt_cli.terminal.table import clock

SIDE = 1000.0
"""Width and height of the coordinate system of a chart; the page stretches it to any size."""
LINES = 8
"""Up to this number of ranks, each has a line of its own; for more, a median and a band from the lowest to the highest
value are drawn."""
PLACES = 200
"""Number of points along the time axis of a band."""

Points = Sequence[tuple[float, float]]
"""Pairs of x and y, ordered by x."""


class Curve(NamedTuple):
    """One rank's values over time, and their mean."""

    points: Points
    mean: float


class Tick(NamedTuple):
    """A label beside an axis of the chart, at a position in per cent of the axis's length."""

    at: float
    label: str


@dataclass
class ChartLine:
    """A line of a chart: its SVG path, its label, and the number of its colour."""

    label: str
    path: str
    colour: int


@dataclass
class Chart:
    """A chart in a square of side SIDE, with y pointing downwards, and the labels beside it."""

    title: str
    lines: list[ChartLine] = field(default_factory=list)
    band: str = ""
    bars: list[tuple[float, float, float, str]] = field(default_factory=list)
    """For each bar its x, width and height, and the text it shows."""
    xs: list[Tick] = field(default_factory=list)
    ys: list[Tick] = field(default_factory=list)
    note: str = ""


def over_time(title: str, curves: Mapping[int, Curve], end: float, top: float | None, unit: str) -> Chart | None:
    """Build a chart of each rank's values over the seconds from 0 to `end`. top: upper end of the y axis; None fits it
    to the values. Returns None if there are no values."""
    known = {rank: curve for rank, curve in sorted(curves.items()) if curve.points}
    if not known or end <= 0:
        return None
    ys = ticks(top or max(y for curve in known.values() for _, y in curve.points) or 1.0)
    top = top or ys[-1]
    chart = Chart(title, ys=[Tick(100 * y / top, _number(y, unit)) for y in ys])
    chart.xs = [Tick(100 * x / end, _seconds(x, end)) for x in time_ticks(end)]
    if len(known) <= LINES:
        for colour, (rank, curve) in enumerate(known.items()):
            chart.lines.append(
                ChartLine(f"rank {rank}: {_number(curve.mean, unit)}", _path(curve.points, end, top), colour)
            )
        chart.note = "Beside the ranks stand their means."
        return chart
    low, middle, high = _spread([curve.points for curve in known.values()], end)
    back = _path(list(reversed(low)), end, top).replace("M", "L", 1)
    chart.band = f"{_path(high, end, top)} {back} Z"
    chart.lines.append(ChartLine(f"median of {len(known)} ranks", _path(middle, end, top), 0))
    by_mean = sorted(known, key=lambda rank: known[rank].mean)
    for colour, (word, rank) in enumerate((("least", by_mean[0]), ("most", by_mean[-1])), 1):
        label = f"rank {rank}, the {word}: {_number(known[rank].mean, unit)}"
        chart.lines.append(ChartLine(label, _path(known[rank].points, end, top), colour))
    chart.note = "The band goes from the least rank to the most at each moment."
    return chart


def distribution(title: str, counts: Mapping[float, int], ratio: float) -> Chart | None:
    """Build a histogram over a logarithmic axis of seconds. counts: number of values in each bar, by the bar's lower
    bound; its upper bound is `ratio` times as large."""
    if not counts:
        return None
    first, last = min(counts), max(counts) * ratio
    most = max(counts.values())
    ys = ticks(most)
    chart = Chart(title, ys=[Tick(100 * y / ys[-1], f"{y:,.0f}") for y in ys if y == int(y)])

    def place(seconds: float) -> float:
        return math.log(seconds / first) / math.log(last / first)

    for bound, count in sorted(counts.items()):
        height = max(count / ys[-1] * SIDE, 6.0)  # a minimum height, so that a single step among many remains visible
        said = f"{duration(bound)} to {duration(bound * ratio)}: {count:,} steps"
        chart.bars.append((place(bound) * SIDE, (place(bound * ratio) - place(bound)) * SIDE, height, said))
    chart.xs = [Tick(100 * place(value), duration(value)) for value in _log_ticks(first, last)]
    return chart


def ticks(top: float) -> list[float]:
    """Return three to six round numbers from 0 up to at least `top`."""
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * index for index in range(math.ceil(top / step * 0.999) + 1)]


def time_ticks(end: float) -> list[float]:
    """Return about five round times from 0 up to at most `end` seconds."""
    steps = [base * unit for unit in (0.01, 0.1, 1, 10) for base in (1, 2, 5)]
    steps += [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200]
    step = next((step for step in steps if end / step <= 6), 86400 * math.ceil(end / 86400 / 6))
    return [step * index for index in range(int(end / step * 1.0001) + 1)]


def duration(seconds: float) -> str:
    """Format a duration, such as 12 us, 3.4 ms, 120 ms, 1.2 s, 4:05 min or 1:02:03 h."""
    if seconds < 59.95:
        factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
        return f"{seconds * factor:.3g} {unit}"
    return f"{clock(round(seconds))} {'h' if round(seconds) >= 3600 else 'min'}"


def _log_ticks(first: float, last: float) -> list[float]:
    """Return about six or fewer round values such as 1, 2, 5, 10 between `first` and `last`, for a logarithmic axis."""
    powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if first <= value <= last]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def _path(points: Points, end: float, top: float) -> str:
    places = ((x / end * SIDE, SIDE - min(1.0, y / top) * SIDE) for x, y in points)
    return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _spread(ranks: Sequence[Points], end: float) -> tuple[Points, Points, Points]:
    """Return the lowest, median and highest y of all ranks, in those of PLACES intervals of time that have values."""
    found: list[list[float]] = [[] for _ in range(PLACES)]
    for points in ranks:
        for x, y in points:
            found[min(PLACES - 1, int(x / end * PLACES))].append(y)
    known = [((index + 0.5) / PLACES * end, sorted(ys)) for index, ys in enumerate(found) if ys]
    low, middle, high = ([(x, ys[round(part * (len(ys) - 1))]) for x, ys in known] for part in (0.0, 0.5, 1.0))
    return low, middle, high


def _number(value: float, unit: str) -> str:
    """Format a number, such as 1.2, 120 or 15k; a share (unit %) as 12 %."""
    if unit == "%":
        return f"{100 * value:.0f} %"
    return f"{value / 1000:,.3g}k" if value >= 10_000 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float, end: float) -> str:
    return f"{value:g} s" if end < 60 else clock(round(value), hours=end >= 3600)
