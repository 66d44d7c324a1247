"""Where the figures of a benchmark go: a table, JSON, CSV, a picture."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dadt.errors import ConfigError
from dadt_cli.terminal.options import paths
from dadt_cli.terminal.table import short

if TYPE_CHECKING:
    from rich.progress import Progress

    from dadt_cli.bench.ratio import Interval

CAPTION = "medians; below them, the interval of 95 %"
json_option = click.option(
    "--json", metavar="FILE", help="Also write the figures as JSON; - for stdout.", shell_complete=paths("file")
)
csv_option = click.option(
    "--csv", metavar="FILE", help="Also write the figures as CSV; - for stdout.", shell_complete=paths("file")
)
plot_option = click.option(
    "--plot", metavar="FILE", help="Also plot them: .png, .svg, .pdf or .html.", shell_complete=paths("file")
)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a benchmark's flags name. Raises ConfigError at once for one that cannot be written at its end."""

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
        """Whether stdout is for a program."""
        return "-" in (self.json, self.csv)


@dataclass(frozen=True, slots=True)
class Table:
    """A shown row: cells of one line, or of a figure and its uncertainty."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]

    def rich(self) -> Any:
        """The first column begins at its left, the others are numbers."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
        made = Table(title=self.title, caption=CAPTION, title_justify="left", **look)
        for i, name in enumerate(self.head):
            made.add_column(name, justify="right" if i else "left", no_wrap=True)
        for line in self.lines:
            parts = (each.partition("\n") for each in line)
            made.add_row(*(Text.assemble(figure, new, (sure, "dim")) for figure, new, sure in parts))
        return made


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of a benchmark."""

    rows: Sequence[Any]
    """Dataclass objects, one for each row of the JSON and of the CSV file."""
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    about: dict[str, Any] = field(default_factory=dict)
    """Further entries of the JSON file."""
    picture: Callable[[], Any] | None = None
    """Draws the figure with matplotlib; None: there is none."""

    def report(self, title: str, outputs: Outputs) -> None:
        rows = [asdict(row) for row in self.rows]
        about = {"title": title, "command": command(), "conditions": conditions(), "notes": self.notes, **self.about}
        if outputs.json is not None:
            _write("--json", outputs.json, json.dumps({**about, "rows": rows}, indent=2) + "\n")
        if outputs.csv is not None:
            _write("--csv", outputs.csv, as_csv(rows))
        if outputs.plot is not None and self.picture is not None:
            from dadt_cli.bench import plot

            plot.save(self.picture(), outputs.plot, about, [(t.title, t.head, t.lines) for t in self.tables])
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
    """The conditions that the figures depend on."""
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
    """A line for each row; what is nested has columns of its own, as rate.median."""
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


def cell(value: Interval | None, unit: float = 1.0) -> str:
    """The median, and on a second line the interval."""
    if value is None:
        return "-"
    return f"{short(value.median * unit)}\n{short(value.low * unit)}–{short(value.high * unit)}"


def progress(total: int) -> AbstractContextManager[tuple[Progress, Any] | None]:
    """A bar on stderr while it is measured, where that is a terminal."""
    return _Bar(total) if sys.stderr.isatty() else nullcontext()


class _Bar(AbstractContextManager["tuple[Progress, Any] | None"]):
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("starts", total=total)

    def __enter__(self) -> tuple[Progress, Any]:
        self._progress.start()
        return self._progress, self._task

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
