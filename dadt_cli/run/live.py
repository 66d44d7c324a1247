"""The live view of `dadt run` on a terminal: one line per rank, below all printed output."""

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
"""Minimum seconds between two writes to the screen, unless more than PENDING_LIMIT bytes are waiting."""
IDLE_SECONDS = 0.5
"""Seconds between two writes to the screen while nothing is printed."""
STDERR = 2
ERASE = b"\x1b[J"
"""Escape sequence that erases from the cursor to the end of the screen."""
ERASE_LINE = b"\x1b[K\n"
PENDING_LIMIT = 1 << 20
"""Most bytes of output that may wait for the next write to the screen."""
PREFIX = "[0-99] "
PRINTED_WIDTH = 40
"""Minimum number of columns for workers' output."""
PRINTED_ROWS = 8
"""Number of screen rows kept free for printed output."""
SILENT_SECONDS = 10.0
DRAWN_BAR = re.compile(r"(?:(?<=%)\|[^|]*\||[━╸╺]|\s)+")
"""Matches the drawn part of a progress bar and the blanks that fill it, which are cut if the line is too long."""
LINE_WIDTH = 12
"""Minimum number of characters for a rank's last printed line; columns of the view are dropped to make room."""


def check(wish: str) -> None:
    """Check the value of --live. Raises ConfigError if the view is demanded but stderr is not a terminal."""
    if wish == "on" and not os.isatty(STDERR):
        raise ConfigError("--live on: stderr is no terminal; leave it out, or give auto")


def wanted(wish: str) -> bool:
    """Return whether to show the live view. With `auto`, it is shown only if stdout and stderr are terminals that can
    move the cursor."""
    if wish != "auto":
        return wish == "on"
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


def variables() -> dict[str, str]:
    """Return variables that make rich and libraries based on it draw progress bars in workers, although workers have no
    terminal."""
    return {"TTY_COMPATIBLE": "1", "COLUMNS": str(max(PRINTED_WIDTH, console.size()[0] - len(PREFIX)))}


def show(watch: Watch, head: str) -> Live:
    """Start the live view. head: describes the job, and is shown above the ranks with the elapsed time."""
    view = Live(watch, head)
    console.print_by(view.above)
    return view


class Live:
    """The live view. It owns the last rows of the screen until `close`; meanwhile all output is printed through
    `above`."""

    def __init__(self, watch: Watch, head: str) -> None:
        self._watch = watch
        self._head = head
        self._pending = bytearray()
        self._drawn: list[int] = []
        """Width of each row of the view that is currently on the screen."""
        self._size = (0, 0)
        self._time = float("-inf")
        ours = os.fstat(STDERR).st_rdev
        self._shared = {stream for stream in (1, 2) if os.isatty(stream) and os.fstat(stream).st_rdev == ours}
        """Output streams (1: stdout, 2: stderr) that lead to the terminal that shows the view."""

    def above(self, stream: int, data: bytes) -> None:
        if stream not in self._shared:
            console.write(stream, data)
            return
        self._pending += data
        if len(self._pending) > PENDING_LIMIT:
            self._draw()

    def tick(self) -> float:
        """Draw the view if enough time has passed. Returns the seconds until the next drawing."""
        interval = DRAW_SECONDS if self._pending else IDLE_SECONDS
        due = self._time + interval - time.monotonic()
        if due > 0:
            return due
        self._draw()
        return IDLE_SECONDS

    def close(self) -> None:
        """Remove the view from the screen and keep all printed output. May be called repeatedly."""
        console.print_by(None)
        console.write(STDERR, self._home() + (ERASE if self._drawn else b"") + self._pending)
        self._pending.clear()
        self._drawn = []

    def _draw(self) -> None:
        """Write printed output and the view at once, overwriting the old view in place if nothing was printed, so that
        the screen does not flicker."""
        before, self._size = self._size, console.size()
        width, height = self._size
        rows = self._rows(width, height)
        # If the size has changed, the old view is erased first, since a terminal that grows would join rows that it
        # broke when it was narrow.
        above = ERASE + self._pending if self._pending or self._size != before else b""
        console.write(STDERR, self._home() + above + ERASE_LINE.join(_encoded(rows, width).split(b"\n")) + ERASE)
        self._pending.clear()
        self._drawn = [row.cell_len for row in rows]
        self._time = time.monotonic()

    def _home(self) -> bytes:
        """Return the escape sequence that moves the cursor from the end of the view to its beginning. If the terminal
        has become narrower since the last drawing, a row of the view that is wider than the terminal counts as several
        rows."""
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
    """Return a header and a row for each rank. Columns that do not fit are left out."""
    from rich.text import Text

    slowest = watch.slowest(time.monotonic())
    columns = _columns(gauges, slowest, len({gauge.host for gauge in watch.gauges}) > 1)
    widths = [max(map(len, column)) for column in columns]
    # If space is short, columns are removed in this order, the least important column first.
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
    """Return the news about a rank, such as its end or its waiting; without news, the last line that the rank
    printed."""
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
    """Encode the rows as bytes for a terminal, with colours unless the user disables them, and without a line end after
    the last row."""
    from rich.console import Console

    stream = io.StringIO()
    paper = Console(file=stream, force_terminal=True, width=width, highlight=False, markup=False, emoji=False)
    for index, row in enumerate(rows):
        paper.print(row, end="" if index == len(rows) - 1 else "\n", no_wrap=True, overflow="ignore", crop=False)
    return stream.getvalue().encode(sys.stderr.encoding or "utf-8", errors="replace")
