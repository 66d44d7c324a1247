"""Formats tables, numbers and times as plain text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dadt_cli.terminal import console


class Table(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()
    """Names of the columns to align left because they do not contain numbers."""
    note: str = ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table. Columns named in `left` are aligned left, all others right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(_cells(head, row, widths, left)).rstrip() for row in (head, *rows)]


def fitting(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str], spare: Sequence[str]) -> list[str]:
    """Return the lines of a table for stdout. On a terminal that is too narrow, the columns in `spare` are dropped one
    by one; if the table is still too wide, its rows are cut off."""
    lines = table(head, rows, left)
    if not sys.stdout.isatty():
        return lines
    width, spare = console.size()[0], list(spare)
    while max(map(len, lines)) > width and spare:
        name = spare.pop(0)
        rows = [[cell for column, cell in zip(head, row, strict=True) if column != name] for row in rows]
        head = [column for column in head if column != name]
        lines = table(head, rows, left)
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _cells(head: Sequence[str], row: Sequence[str], widths: Sequence[int], left: Sequence[str]) -> list[str]:
    triples = zip(head, row, widths, strict=True)
    return [cell.ljust(width) if name in left else cell.rjust(width) for name, cell, width in triples]


def without_python(command: Sequence[str]) -> Sequence[str]:
    """Return the command without the Python interpreter."""
    return command[1:] if len(command) > 1 and Path(command[0]).name.startswith("python") else command


def figure(value: float) -> str:
    """Format a speed, such as 0.25, 8.3, 120 or 1,500."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def moment(at: float) -> str:
    """Format a time: the time of day alone if the time is today, otherwise with the date."""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)


def short(value: float) -> str:
    """Format a number with three or four digits."""
    if abs(value) >= 9999.5:
        return f"{value / 1e3:.3g}k" if abs(value) < 9.995e5 else f"{value / 1e6:.3g}M"
    return f"{value:.2f}" if -1 < value < 10 else figure(value) if value > 0 else f"{value:.0f}"


def clock(seconds: int, hours: bool = False) -> str:
    """Format a duration as 4:05, or as 1:02:03 from one hour on. hours: show hours in any case."""
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour or hours else f"{minute}:{second:02}"


def duration(seconds: float) -> str:
    """Format a duration in words, such as 40 s or 3 min."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
