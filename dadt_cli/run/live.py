"""The live view of `dadt run` on a terminal: a line per rank below everything that is printed."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from typing import TYPE_CHECKING

from dadt.errors import ConfigError
from dadt.launch.ending.failure import size
from dadt_cli.terminal import console
from dadt_cli.terminal.table import clock, figure

if TYPE_CHECKING:
    from rich.text import Text

    from dadt.launch.monitor.watch import Gauge, Watch

DRAW_SECONDS = 0.25
"""Least seconds between two times that the screen is written to, unless more than PENDING_LIMIT waits to be printed."""
IDLE_SECONDS = 0.5
"""Seconds between two times that the screen is written to if nothing is printed."""
STDERR = 2
ERASE = b"\x1b[J"
"""Erases from the cursor to the end of the screen."""
ERASE_LINE = b"\x1b[K\n"
PENDING_LIMIT = 1 << 20
"""Most bytes of output that wait until the screen is written to."""
PREFIX = "[0-99] "
PRINTED_WIDTH = 40
"""Least columns for the lines of workers."""
PRINTED_ROWS = 8
"""Rows of the screen that are left for what is printed."""
SILENT_SECONDS = 10.0
DRAWN_BAR = re.compile(r"(?:(?<=%)\|[^|]*\||[━╸╺]|\s)+")
"""The part of a progress bar that is no text, and blanks, which fill it up."""
LINE_WIDTH = 12
"""The last line a rank printed is not shown if it would get less."""


def check(wish: str) -> None:
    """Raises ConfigError where the view is wanted but cannot be."""
    if wish == "on" and not os.isatty(STDERR):
        raise ConfigError("--live on: stderr is no terminal; leave it out, or give auto")


def wanted(wish: str) -> bool:
    """auto: where all that is printed goes to a terminal that can move its cursor."""
    if wish != "auto":
        return wish == "on"
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


def variables() -> dict[str, str]:
    """Variables with which rich, and what builds on it, draws bars for the view, though workers have no terminal."""
    return {"TTY_COMPATIBLE": "1", "COLUMNS": str(max(PRINTED_WIDTH, console.size()[0] - len(PREFIX)))}


def show(watch: Watch, head: str) -> Live:
    """Begin. head: what the job is; stands above the ranks with the time since it began."""
    view = Live(watch, head)
    console.show_above(view)
    return view


class Live:
    """Owns the last rows of the screen until `close`: everything is printed through `above`."""

    def __init__(self, watch: Watch, head: str) -> None:
        self._watch = watch
        self._head = head
        self._pending = bytearray()
        self._drawn: list[int] = []
        """Width of each row that is on the screen."""
        self._size = (0, 0)
        self._time = float("-inf")
        ours = os.fstat(STDERR).st_rdev
        self._shared = {stream for stream in (1, 2) if os.isatty(stream) and os.fstat(stream).st_rdev == ours}
        """Streams that show on our terminal."""

    def above(self, stream: int, data: bytes) -> None:
        if stream not in self._shared:
            console.write(stream, data)
            return
        self._pending += data
        if len(self._pending) > PENDING_LIMIT:
            self._draw()

    def tick(self) -> float:
        """Draw if it is time to. Returns the seconds until it will be."""
        interval = DRAW_SECONDS if self._pending else IDLE_SECONDS
        due = self._time + interval - time.monotonic()
        if due > 0:
            return due
        self._draw()
        return IDLE_SECONDS

    def close(self) -> None:
        """Leave what was printed, and nothing of the view. Idempotent."""
        console.show_above(None)
        console.write(STDERR, self._home() + (ERASE if self._drawn else b"") + self._pending)
        self._pending.clear()
        self._drawn = []

    def _draw(self) -> None:
        """Write all in one go, and in place where nothing was printed: so it does not flicker."""
        before, self._size = self._size, console.size()
        width, height = self._size
        rows = self._rows(width, height)
        # A row that was broken is joined again when the terminal grows, unless it was erased meanwhile.
        above = ERASE + self._pending if self._pending or self._size != before else b""
        console.write(STDERR, self._home() + above + ERASE_LINE.join(_encoded(rows, width).split(b"\n")) + ERASE)
        self._pending.clear()
        self._drawn = [row.cell_len for row in rows]
        self._time = time.monotonic()

    def _home(self) -> bytes:
        """What moves the cursor from the end of the last row to the beginning of the first. Since they were drawn the
        terminal may have become narrower: then it has broken the rows that do not fit any more."""
        if not self._drawn:
            return b""
        width, _ = console.size()
        up = sum(max(1, -(-row // width)) for row in self._drawn) - 1
        return b"\r" + (b"\x1b[%dA" % up if up else b"")

    def _rows(self, width: int, height: int) -> list[Text]:
        from rich.text import Text

        watch = self._watch
        room = max(1, height - PRINTED_ROWS)
        gauges = watch.gauges if len(watch.gauges) <= room else watch.by_pace(time.monotonic())[: room - 1]
        shown = sorted(gauges, key=lambda gauge: gauge.rank) if len(gauges) == len(watch.gauges) else gauges
        missing = sum(loss.replaced is None for loss in watch.losses)
        lost = f", {missing} lost" if missing else ""
        rows = [Text(f"{self._head}{lost}, {clock(int(time.time() - watch.begin))}", style="bold")]
        rows += _table(shown, watch, width)
        if left := len(watch.gauges) - len(shown):
            rows.append(Text(_folded(watch, left), style="dim"))
        for row in rows:
            row.truncate(max(1, width - 1), overflow="ellipsis")
        return rows


def _table(gauges: list[Gauge], watch: Watch, width: int) -> list[Text]:
    """A header and a row for each gauge; columns for which there is no room are left out."""
    from rich.text import Text

    slowest = watch.slowest(time.monotonic())
    columns = _columns(gauges, slowest, len({gauge.host for gauge in watch.gauges}) > 1)
    widths = [max(map(len, column)) for column in columns]
    # By what one can do without, first.
    for name in ("memory", "samples/s", "host", "waiting", "steps/s"):
        if sum(widths) + 2 * len(widths) + LINE_WIDTH < width:
            break
        for index, column in enumerate(columns):
            if column[0] == name:
                del columns[index], widths[index]
                break
    rows = []
    for index in range(len(gauges) + 1):
        cells = [_aligned(column, index, width) for column, width in zip(columns, widths, strict=True)]
        text = Text("  ".join(cells), style="dim" if index == 0 else "")
        if index:
            gauge = gauges[index - 1]
            if gauge is slowest or gauge.code:
                text.stylize("bold red" if gauge.code else "yellow")
            note = _note(gauge, gauge is slowest)
            if text.cell_len + 2 + len(note) >= width:
                note = DRAWN_BAR.sub(" ", note)
            text.append("  " + note, style="" if gauge.code else "dim")
        rows.append(text)
    return rows


def _aligned(column: list[str], index: int, width: int) -> str:
    return column[index].ljust(width) if column[0] == "host" else column[index].rjust(width)


def _columns(gauges: list[Gauge], slowest: Gauge | None, hosts: bool) -> list[list[str]]:
    now = time.monotonic()
    speeds = [gauge.speed(now) for gauge in gauges]
    columns = [["rank", *(f"{'>' if gauge is slowest else ''}{gauge.rank}" for gauge in gauges)]]
    if hosts:
        columns.append(["host", *(gauge.host for gauge in gauges)])
    columns.append(["step", *(str(gauge.member.step) if gauge.member.step >= 0 else "-" for gauge in gauges)])
    columns.append(["steps/s", *(figure(speed.steps) if speed else "-" for speed in speeds)])
    if any(gauge.samples for gauge in gauges):
        columns.append(["samples/s", *(figure(speed.samples) if speed else "-" for speed in speeds)])
    columns.append(["waiting", *(f"{100 * speed.wait:.0f} %" if speed else "-" for speed in speeds)])
    columns.append(["memory", *(size(gauge.memory) if gauge.memory else "-" for gauge in gauges)])
    return columns


def _note(gauge: Gauge, slowest: bool) -> str:
    """The news of a rank, else its last line."""
    member = gauge.member
    now = time.monotonic()
    silence = now - member.seen
    if member.ended or member.finished:
        return member.standing
    if slowest:
        mark = f"slowest, silent for {silence:.0f} s" if silence > SILENT_SECONDS else "slowest"
        return f"{mark}  {gauge.line}"
    if member.waits(now):
        return f"waits for others, for {silence:.0f} s"
    return gauge.line or ("" if member.state.startswith("at step") else member.state)


def _folded(watch: Watch, left: int) -> str:
    least, most = watch.steps()
    return f"and {left} faster ranks; all are at steps {least} to {most}"


def _encoded(rows: list[Text], width: int) -> bytes:
    """The rows as bytes for a terminal: with colours, unless the user wants none; without a line's end after the last
    row."""
    from rich.console import Console

    stream = io.StringIO()
    paper = Console(file=stream, force_terminal=True, width=width, highlight=False, markup=False, emoji=False)
    for index, row in enumerate(rows):
        paper.print(row, end="" if index == len(rows) - 1 else "\n", no_wrap=True, overflow="ignore", crop=False)
    return stream.getvalue().encode(sys.stderr.encoding or "utf-8", errors="replace")
