"""Writes the figures of a benchmark: as a table on the terminal, JSON, CSV or a plot."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import wraps
from pathlib import Path
from typing import Any

import click

from dadt.errors import ConfigError
from dadt_cli.terminal.options import paths

CAPTION = "medians; below them, the interval of 95 %"
FILES = {
    "json": "Also write the figures as JSON; - for stdout.",
    "csv": "Also write the figures as CSV; - for stdout.",
    "plot": "Also plot them: .png, .svg, .pdf or .html.",
}
"""Flags of benchmarks that name output files, with their help texts."""


def writes(*kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the flags `kinds` of FILES to a command. The command receives their values as
    `outputs`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            return function(outputs=Outputs(**{kind: given.pop(kind) for kind in kinds}), **given)

        for kind in reversed(kinds):
            option = click.option(f"--{kind}", metavar="FILE", help=FILES[kind], shell_complete=paths("file"))
            command = option(command)
        return command

    return decorate


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output files named by a benchmark's flags. Raises ConfigError before the benchmark starts if a file could not
    be written at its end."""

    json: str | None = None
    csv: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            file = getattr(self, name)
            if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
                raise ConfigError(f"--{name} {file}: there is no folder {Path(file).absolute().parent}")
        if self.json == "-" == self.csv:
            raise ConfigError("--json - and --csv - both want stdout: give one of them a file")
        if self.plot is not None:
            from dadt_cli.bench import plot

            plot.check(self.plot)

    @property
    def quiet(self) -> bool:
        """Whether JSON or CSV goes to stdout for another program, so that no table may be printed."""
        return "-" in (self.json, self.csv)


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table of results to display. Each cell has one line, or a figure and below it its interval of uncertainty."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    caption: str = CAPTION

    @classmethod
    def of(cls, title: str, rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> ResultTable:
        """Return a table with a line for each of `rows`. columns: maps each column's heading to the function that
        returns the cell of a row."""
        return cls(title, list(columns), [[cell_of(row) for cell_of in columns.values()] for row in rows])

    def rich(self) -> Any:
        """Return the table in rich's form: the first column left-aligned, columns of numbers right-aligned, and the
        best figures, which end with a star, in green."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
        made = Table(title=self.title, caption=self.caption, title_justify="left", **look)
        for i, name in enumerate(self.head):
            made.add_column(name, justify="right" if i else "left", no_wrap=True)
        for line in self.lines:
            parts = (each.partition("\n") for each in line)
            cells = (
                Text.assemble((figure, "bold green" if figure.endswith("*") else ""), new, (sure, "dim"))
                for figure, new, sure in parts
            )
            made.add_row(*cells)
        return made


@dataclass(frozen=True, slots=True)
class BenchResults:
    """The result of a benchmark: rows of data, tables, notes and a plot."""

    rows: Sequence[Any]
    """Dataclass objects, one for each row of the JSON and of the CSV file."""
    tables: Sequence[ResultTable]
    notes: Sequence[str] = ()
    about: dict[str, Any] = field(default_factory=dict)
    """Further entries to write to the JSON file."""
    picture: Callable[[], Any] | None = None
    """Called to draw the plot with matplotlib; None if the benchmark has no plot."""

    def report(self, title: str, outputs: Outputs) -> None:
        rows = [asdict(row) for row in self.rows]
        about = {"title": title, "command": command(), "conditions": conditions(), "notes": self.notes, **self.about}
        if outputs.json is not None:
            _write("--json", outputs.json, json.dumps({**about, "rows": rows}, indent=2) + "\n")
        if outputs.csv is not None:
            _write("--csv", outputs.csv, as_csv(rows))
        if outputs.plot is not None and self.picture is not None:
            from dadt_cli.bench import plot

            plot.save(self.picture(), outputs.plot, about, self.tables)
        if not outputs.quiet:
            self._show()

    def _show(self) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        for table in self.tables:
            console.print(table.rich())
        for note in self.notes:
            console.print(note, markup=False, soft_wrap=not console.is_terminal)


def command() -> str:
    return " ".join(["dadt", *sys.argv[1:]])


def conditions() -> dict[str, Any]:
    """Return the conditions that the figures depend on: time, versions, machine, cores and load."""
    from dadt import _core

    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "dadt": _core.__version__,
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "simd": _core.simd,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as CSV, one line each. Nested values have columns of their own, such as rate.median."""
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if value is None:
        return []
    if isinstance(value, dict):
        return [pair for key, each in value.items() for pair in _flat(each, f"{name}.{key}" if name else key)]
    if isinstance(value, (list, tuple)) and any(isinstance(each, dict) for each in value):
        return [pair for i, each in enumerate(value) for pair in _flat(each, f"{name}.{i}")]
    return [(name, " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value)]


def _write(name: str, file: str, text: str) -> None:
    if file == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise ConfigError(f"{name} {file}: cannot write it ({error.strerror})") from error


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Context manager that shows a progress bar if stderr is a terminal. Yields a function to call before each step,
    with a text that describes the step."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("starts", total=total)
        yield lambda what: bar.update(row, advance=1, description=what)
