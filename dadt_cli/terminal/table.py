"""Columns of plain text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()
    """Columns that are no figures."""
    note: str = ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Lines with aligned columns; those named in `left` begin at their left, numbers end at their right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(_cells(head, row, widths, left)).rstrip() for row in (head, *rows)]


def _cells(head: Sequence[str], row: Sequence[str], widths: Sequence[int], left: Sequence[str]) -> list[str]:
    triples = zip(head, row, widths, strict=True)
    return [cell.ljust(width) if name in left else cell.rjust(width) for name, cell, width in triples]


def figure(value: float) -> str:
    """A speed: 0.25, 8.3, 120, 1,500."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def moment(at: float) -> str:
    """Today's time of day, else the day, too."""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)


def short(value: float) -> str:
    """Three or four digits."""
    if abs(value) >= 9999.5:
        return f"{value / 1e3:.3g}k" if abs(value) < 9.995e5 else f"{value / 1e6:.3g}M"
    return f"{value:.2f}" if -1 < value < 10 else figure(value) if value > 0 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """As people say it: 40 s, 3 min."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
