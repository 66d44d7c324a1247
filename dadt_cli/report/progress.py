"""Shows how training progressed on each rank: throughput, waiting and step times, from the job's record."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dadt.control.step_times import PER_DOUBLING, bound
from dadt_cli.report import chart
from dadt_cli.report.chart import Chart, Curve
from dadt_cli.report.record import LARGEST, JobRecord, Moment
from dadt_cli.terminal.table import Table

POINTS = 240
"""Number of points along the time axis of a line."""
SILENT_SECONDS = 5.0
"""A rank that has made no step for this many seconds, and for three times its usual interval, is drawn as standing
still."""
QUANTILES = (0.5, 0.95, 0.99)
SIZES = range(-240, 240)
"""Valid numbers of bins in the histogram of step times, from nanoseconds to years."""


def over_time(record: JobRecord) -> list[Chart]:
    """Return charts of each rank's throughput and waiting; a chart without data is left out."""
    end = record.report.get("seconds") or _last(record) - record.report.get("begin", 0.0)
    return [each for each in (_throughput(record, end), _waiting(record, end)) if each is not None]


def _throughput(record: JobRecord, end: float) -> Chart | None:
    counted = any(moments[-1].samples for moments in record.series.values())
    of, words = ("samples", "samples") if counted else ("step", "steps")
    curves = {}
    for rank, moments in record.series.items():
        points = _rates(record, moments, of)
        curves[rank] = Curve(points + _silence(record, moments, points, end), _mean(moments, of))
    return chart.over_time(f"Throughput of each rank: {words} per second", curves, end, None, "")


def _waiting(record: JobRecord, end: float) -> Chart | None:
    curves = {
        rank: Curve([(x, min(1.0, y)) for x, y in _rates(record, moments, "waited")], _mean(moments, "waited"))
        for rank, moments in record.series.items()
    }
    return chart.over_time("Waiting: share of the time that training stood still", curves, end, 1.0, "%")


def _rates(record: JobRecord, moments: list[Moment], of: str) -> list[tuple[float, float]]:
    """Return points of a rate: x is seconds since the job began, y the growth of `of` per second of the rank's own
    clock, between records in which this clock advanced."""
    known = moments[:1] + [after for before, after in itertools.pairwise(moments) if after.clock > before.clock]
    every = max(1, len(known) // POINTS)
    known = [*known[:-1:every], known[-1]]
    # Records reach the launcher with a delay. The record with the shortest delay gives the best estimate of the
    # difference between the launcher's and the rank's clock.
    offset = min(moment.time - moment.clock for moment in known) - record.report.get("begin", 0.0)
    return [
        (max(0.0, (a.clock + b.clock) / 2 + offset), max(0.0, getattr(b, of) - getattr(a, of)) / (b.clock - a.clock))
        for a, b in itertools.pairwise(known)
    ]


def _mean(moments: Sequence[Moment], of: str) -> float:
    first, last = moments[0], moments[-1]
    return float(getattr(last, of) - getattr(first, of)) / max(last.clock - first.clock, 1e-9)


def _silence(
    record: JobRecord, moments: Sequence[Moment], points: Sequence[tuple[float, float]], end: float
) -> list[tuple[float, float]]:
    """Return two points with rate zero, from the rank's last step to the end, if the rank kept reporting without making
    steps; an empty list otherwise."""
    last = next((moment for moment in moments if moment.clock == moments[-1].clock), moments[-1])
    usual = (last.time - moments[0].time) / max(1, len(points))
    begin = last.time - record.report.get("begin", 0.0)
    return [(begin, 0.0), (end, 0.0)] if moments[-1].time - last.time > max(SILENT_SECONDS, 3 * usual) else []


def _last(record: JobRecord) -> float:
    """Return the latest time in the record, in seconds since 1970; 0 if the record has no times."""
    times = [event["time"] for event in record.events] + [moments[-1].time for moments in record.series.values()]
    return max(times, default=0.0)


def _counts(rank: Mapping[str, Any]) -> dict[int, int]:
    """Return a rank's number of steps by number of the step-time bin, without invalid bins."""
    told = (rank.get("step_times") or {}).get("counts") or {}
    sizes = {str(size): size for size in SIZES}
    return {sizes[name]: n for name, n in told.items() if name in sizes and isinstance(n, int) and 0 < n < LARGEST}


def step_times(report: Mapping[str, Any]) -> Chart | None:
    sums: dict[float, int] = {}
    for rank in report.get("ranks", []):
        for each, count in _counts(rank).items():
            sums[bound(each)] = sums.get(bound(each), 0) + count
    return chart.distribution("Step times: steps of all ranks by their duration", sums, bound(1))


def step_table(report: Mapping[str, Any]) -> Table | None:
    rows = []
    for rank in report.get("ranks", []):
        if counts := _counts(rank):
            times = [*(_quantile(counts, part) for part in QUANTILES), bound(max(counts) + 1)]
            rows.append([str(rank.get("rank", "?")), f"{sum(counts.values()):,}", *map(chart.duration, times)])
    head = ["rank", "steps", "median", "95 %", "99 %", "longest, up to"]
    note = "From the end of a step to the end of the next, whatever the script does in between; to within 9 %."
    return Table("Step times", head, rows, note=note) if rows else None


def _quantile(counts: Mapping[int, int], part: float) -> float:
    left = part * sum(counts.values())
    for each in sorted(counts):
        left -= counts[each]
        if left <= 0:
            return float(bound(each) * 2 ** (0.5 / PER_DOUBLING))
    return bound(max(counts) + 1)
