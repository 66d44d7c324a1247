"""Plots of benchmark results, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dadt.errors import ConfigError
from dadt_cli.terminal.table import short
from dadt_cli.terminal.template import template

if TYPE_CHECKING:
    from dadt_cli.bench.allreduce import AllreduceRow as AllreduceRow
    from dadt_cli.bench.ratio import Interval
    from dadt_cli.bench.training import TrainingRow

KINDS = (".png", ".svg", ".pdf", ".html")
COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#cb912f", "#337ea9", "#787774")
GREY = "#9b9a97"
DASHES = {"plain": ":", "null (limit)": "--"}
"""Line styles of the contenders that exchange nothing, by the contender's name."""
INCHES = (8.0, 3.6)
DOTS = 200
"""Dots per inch of the image, which is twice as wide as the 800 pixels at which a README shows it, for sharp screens.
"""
TEMPLATE = Path(__file__).with_name("plot.html")


def check(file: str) -> None:
    """Check before a measurement that its plot could be written. Raises ConfigError for an unknown kind of file, or if
    matplotlib is missing."""
    if Path(file).suffix.lower() not in KINDS:
        raise ConfigError(f"--plot {file}: give a file that ends in {', '.join(KINDS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {file}: pictures are made by matplotlib -> pip install 'dadt[bench]'")


def save(figure: Any, file: str, about: dict[str, Any], tables: Sequence[Any]) -> None:
    """Write the plot to a file; an HTML page also gets the tables. Raises ConfigError if the file cannot be written."""
    kind = Path(file).suffix.lower()
    try:
        if kind != ".html":
            figure.savefig(file, dpi=DOTS)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        Path(file).write_text(page(drawn.getvalue(), about, tables))
    except OSError as error:
        raise ConfigError(f"--plot {file}: cannot write it ({error.strerror})") from error


def page(svg: str, about: dict[str, Any], tables: Sequence[Any]) -> str:
    """Return an HTML page, which needs no other file, with the plot, its figures and the conditions of the measurement.
    tables: the tables of results."""
    return template(TEMPLATE, "--plot").render(svg=svg[svg.index("<svg") :], tables=tables, **about)


def training(rows: Sequence[TrainingRow], unit: str, title: str) -> Any:
    """Plot the results of a training benchmark: bars if contenders are compared, lines if there are several numbers of
    workers."""
    several = len({row.ranks for row in rows if row.ranks > 1}) > 1
    figure, axes = _figure(title)
    (_over_workers if several else _against)(axes, rows, unit)
    return figure


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, 2)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=9)
    return figure, axes


def _over_workers(axes: Any, rows: Sequence[TrainingRow], unit: str) -> None:
    """Draw throughput and efficiency over the number of workers. There is a line for each contender and batch size."""
    batches = {row.batch_size for row in rows}
    one = {row.batch_size: row for row in reversed(rows) if row.ranks == 1}
    lines: dict[tuple[str, int], list[TrainingRow]] = {}
    for row in rows:
        if row.ranks > 1:
            lines.setdefault((row.name, row.batch_size), []).append(row)
    colours = cycle(COLOURS)
    for (name, batch), points in lines.items():
        dashes = DASHES.get(name)
        style = {"color": GREY, "linestyle": dashes} if dashes else {"color": next(colours), "marker": "o"}
        style["label"] = f"{name}, batch {batch}" if len(batches) > 1 else name
        if batch in one:
            points = [one[batch], *points]
        _line(axes[0], [p.ranks for p in points], [p.rate for p in points], 1.0, style)
        known = [p for p in points if p.efficiency is not None]
        _line(axes[1], [p.ranks for p in known], [p.efficiency for p in known if p.efficiency], 100.0, style)
    for each, label in zip(axes, (f"{unit}/s of all workers", "efficiency, % of plain"), strict=True):
        each.set_xlabel("workers", fontsize=9)
        each.set_ylabel(label, fontsize=9)
        each.set_ylim(bottom=0)
        each.set_xticks(sorted({row.ranks for row in rows}))
        each.grid(alpha=0.3)
    axes[1].set_xlim(axes[0].get_xlim())
    axes[0].legend(fontsize=8, frameon=False)


def _line(axis: Any, x: Sequence[float], values: Sequence[Interval], unit: float, style: dict[str, Any]) -> None:
    low, high = ([unit * getattr(v, end) for v in values] for end in ("low", "high"))
    axis.plot(x, [unit * v.median for v in values], **style)
    axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _against(axes: Any, rows: Sequence[TrainingRow], unit: str) -> None:
    """Draw each contender's throughput and efficiency as bars; whiskers show 95 % intervals."""
    batches = {row.batch_size for row in rows}
    names = [f"{row.name}, batch {row.batch_size}" if len(batches) > 1 else row.name for row in rows]
    colours = cycle(COLOURS)
    painted = [GREY if row.name in DASHES or row.ranks == 1 else next(colours) for row in rows]
    _bars(axes[0], [row.rate for row in rows], 1.0, painted, [_said(row.rate, "") for row in rows])
    shares = [row.efficiency for row in rows]
    _bars(axes[1], shares, 100.0, painted, [_said(share, " %", 100.0) for share in shares])
    axes[0].set_yticks(range(len(rows)), names)
    axes[1].set_yticks(range(len(rows)), [""] * len(rows))
    axes[0].set_xlabel(f"{unit}/s of all workers", fontsize=9)
    axes[1].set_xlabel("efficiency, % of plain", fontsize=9)


def _bars(
    axis: Any, values: Sequence[Interval | None], unit: float, colours: Sequence[str], texts: Sequence[str]
) -> None:
    highest = max((unit * value.high for value in values if value), default=1.0)
    for i, (value, colour, text) in enumerate(zip(values, colours, texts, strict=True)):
        if value is None:
            continue
        middle, low, high = (unit * each for each in (value.median, value.low, value.high))
        axis.barh(i, middle, color=colour, height=0.65)
        axis.errorbar(middle, i, xerr=[[middle - low], [high - middle]], color="#333", capsize=3, linewidth=1)
        axis.text(high + 0.02 * highest, i, text, va="center", fontsize=9)
    axis.invert_yaxis()
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.set_xlim(0, 1.22 * highest)


def _said(value: Interval | None, unit: str, factor: float = 1.0) -> str:
    return "" if value is None else f"{short(factor * value.median)}{unit}"


def allreduce(rows: Sequence[AllreduceRow], title: str) -> Any:
    """Plot time and bus bandwidth of allreduce by message size."""
    figure, axes = _figure(title)
    for name, colour in zip(("dadt", "gloo", "memcpy"), (*COLOURS[:2], GREY), strict=True):
        style: dict[str, Any] = {"color": colour, "label": name, "marker": "." if name == "memcpy" else "o"}
        times = [getattr(row, name) for row in rows]
        _line(axes[0], [row.bytes for row in rows], times, 1e6, style)
        if name != "memcpy":
            speeds = [row.busbw(time) for row, time in zip(rows, times, strict=True)]
            _line(axes[1], [row.bytes for row in rows], speeds, 1e-9, style)
    axes[0].set_yscale("log")
    for each, label in zip(axes, ("µs", "bus bandwidth, GB/s"), strict=True):
        each.set_xscale("log", base=2)
        each.set_xlabel("bytes", fontsize=9)
        each.set_ylabel(label, fontsize=9)
        each.set_xticks([row.bytes for row in rows], [size(row.bytes) for row in rows])
        each.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    axes[1].set_ylim(bottom=0)
    return figure


def size(count: int) -> str:
    """Format a number of bytes in powers of 1,024, such as 64K, 1M, 1.5M or 100."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)
