r"""Splits what a worker prints into lines, where progress bars redraw themselves.

A bar moves the cursor back to the beginning of its row and draws over the row (\r, \b, or an escape sequence that
erases); nested bars move the cursor between rows. As on a terminal, only the last state of each row is kept.

While a program such as the library rich hides the cursor, the cursor may be below progress bars that will be drawn
again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

BAR_SECONDS = 30.0
"""Seconds between two shown lines of the same progress bar, if no live view shows the bar moving."""
LEFT_SECONDS = 0.1
"""Seconds after which a progress bar counts as ended once the cursor has left its row. With nested bars, the cursor
returns sooner."""
HIDDEN_SECONDS = 1.0
"""While a program hides the cursor, seconds after which its first line counts as ended, instead of LEFT_SECONDS. The
line may be a progress bar that looks like text at first."""
LINE_LIMIT = 1 << 16
"""Number of bytes after which a line without an end is cut."""
ROWS = 64
"""Largest number of rows that a worker may redraw at once."""
NEVER = float("inf")
BAR = re.compile(rb"%\||\xe2\x94\x81|\xe2\x96[\x88-\x8f]")
"""Matches text that only progress bars contain: "%|" of tqdm, and the block and line characters with which bars are
drawn."""
MOVES = re.compile(rb"\r+\n|\n|\r|\x08+|\x1b\[\??([0-9;]{0,9})([ABEFGKhl])")
UNFINISHED = re.compile(rb"\r\Z|\x1b(?:\[\??[0-9;]{0,9})?\Z")
"""Matches the end of a piece of output whose meaning depends on the next piece, such as half an escape sequence."""


@dataclass(slots=True)
class PrintedRow:
    """A row of output that has not ended yet, or that may still be redrawn."""

    drawn: bytes = b""
    """Text written to the row since the cursor last returned to its beginning."""
    state: bytes = b""
    """Text that the row showed before the cursor last returned to its beginning."""
    is_bar: bool = False
    since: float = NEVER
    """Time at which the progress bar in this row appeared, or was last returned as a line."""
    given: bytes = b""
    """Text of this row that was last returned as a line."""
    left: float = NEVER
    """Time at which the cursor moved from this row to a row below; infinite if it did not."""

    @property
    def text(self) -> bytes:
        """The row's text as a terminal shows it."""
        return self.drawn if self.drawn.strip() else self.state

    def go_back(self) -> None:
        """Move the cursor to the beginning of the row, so that the next text is drawn over it. A row that was
        overwritten with spaces is no bar any more, as the next text may be an ordinary line."""
        self.is_bar = not self.drawn or bool(self.drawn.strip())
        self.state = self.text if self.is_bar else b""
        self.drawn = b""

    def leave(self) -> None:
        """Move the cursor to another row. A row that was overwritten with spaces becomes empty."""
        if self.drawn and not self.drawn.strip():
            self.drawn = self.state = b""

    def erase(self, whole: bool) -> None:
        """Erase the whole row, or only what remains in it from before the cursor returned to its beginning."""
        self.drawn, self.state, self.is_bar = b"" if whole else self.drawn, b"", True


class Printed:
    """Converts the bytes of one output stream of a worker into complete lines. Lines are bytes, too; nothing is
    decoded."""

    def __init__(self) -> None:
        self._rest = b""
        """The end of the last piece of output if its meaning depends on the next piece, such as half an escape
        sequence; else empty."""
        self._rows = [PrintedRow()]
        self._cursor = 0
        self._hidden = False
        """Whether the worker has hidden the terminal's cursor."""
        self._raised = -NEVER
        """Time at which the cursor last moved up since it was hidden or shown; minus infinity if it has not moved
        up."""

    def feed(self, data: bytes, now: float, every: float = BAR_SECONDS) -> list[bytes]:
        """Add a piece of output. Returns the lines that are complete. every: seconds between two lines that show the
        same progress bar."""
        data = self._rest + data
        unfinished = UNFINISHED.search(data)
        data, self._rest = (data[: unfinished.start()], unfinished[0]) if unfinished else (data, b"")
        plain = len(self._rows) == 1 and not self._rows[0].is_bar
        if plain and b"\r" not in data and b"\x08" not in data and b"\x1b" not in data:
            *lines, rest = (self._rows[0].drawn + data).split(b"\n")
            self._rows[0].drawn = rest
            return [*lines, *self._cut()]
        return [*self._parse(data, now), *self._cut(), *self.tick(now, every)]

    def tick(self, now: float, every: float = BAR_SECONDS) -> list[bytes]:
        """Return the lines that are due at time `now`: those of rows that have ended, and those of progress bars that
        were last returned at least `every` seconds ago."""
        lines = []
        while self._ends() <= now:
            lines += self._end_first()
        for row in self._rows:
            if row.is_bar and row.since + every <= now:
                lines += self._state_of(row)
                row.since = now
        return lines

    def due(self, every: float = BAR_SECONDS) -> float:
        """Return the time at which `tick` will have lines to return; infinite if it has none."""
        return min(self._ends(), *(row.since + every for row in self._rows if row.is_bar), NEVER)

    def settle(self) -> list[bytes]:
        """Return the progress bars above an empty row. They have ended if the process now writes to its other
        stream."""
        lines = []
        while self._cursor and not self._hidden and not self._rows[self._cursor].text:
            lines += self._end_first()
        return lines

    def finish(self) -> list[bytes]:
        """Return the lines that are left at the end of the stream, which no newline has ended."""
        lines = [line for row in self._rows for line in self._state_of(row)]
        self._rows, self._cursor, self._rest = [PrintedRow()], 0, b""
        return lines

    def _ends(self) -> float:
        """Return the time at which the first row counts as ended. While the cursor is hidden, it does so only if the
        cursor has later moved up to a row below it, or, if the cursor never moved up, HIDDEN_SECONDS after the cursor
        has left the row."""
        left = self._rows[0].left if self._cursor else NEVER
        if not self._hidden or left < self._raised:
            return left + LEFT_SECONDS
        return left + HIDDEN_SECONDS if self._raised == -NEVER else NEVER

    def _parse(self, data: bytes, now: float) -> Iterator[bytes]:
        at = 0
        for move in MOVES.finditer(data):
            self._draw(data[at : move.start()], now)
            at = move.end()
            yield from self._move(move, now)
        self._draw(data[at:], now)

    def _draw(self, text: bytes, now: float) -> None:
        row = self._rows[self._cursor]
        row.drawn += text
        if row.is_bar and row.since == NEVER:
            row.since = now

    def _move(self, move: re.Match[bytes], now: float) -> Iterator[bytes]:
        row, what, kind = self._rows[self._cursor], move[0], move[2]
        number = int(move[1]) if move[1] and move[1].isdigit() else 1
        if what.endswith(b"\n"):
            yield from self._end_line(now)
        elif what == b"\r" or (kind == b"G" and number <= 1):
            row.go_back()
        elif what[:1] == b"\x08":
            row.state, row.drawn, row.is_bar = row.text, row.drawn[: -len(what)], True
        elif kind in (b"A", b"F"):
            row.leave()
            self._cursor = max(0, self._cursor - number)
            self._rows[self._cursor].left, self._raised = NEVER, now
        elif kind in (b"B", b"E"):
            for _ in range(min(number, ROWS)):
                yield from self._down(now)
        elif kind == b"K":
            row.erase(whole=move[1] in (b"1", b"2"))
        elif what in (b"\x1b[?25l", b"\x1b[?25h"):
            self._hidden, self._raised = kind == b"l", -NEVER

    def _end_line(self, now: float) -> Iterator[bytes]:
        row = self._rows[self._cursor]
        if row.is_bar or self._hidden:
            yield from self._down(now)
            return
        # The row is an ordinary line, so progress bars above it will not be drawn again and have ended.
        while self._cursor:
            yield from self._end_first()
        # If the row was returned as a progress bar before, the newline only ends this bar and does not make an empty
        # line.
        if row.drawn.strip() or not row.given:
            yield row.drawn
        self._rows.pop(0)
        self._rows = self._rows or [PrintedRow()]

    def _down(self, now: float) -> Iterator[bytes]:
        row = self._rows[self._cursor]
        row.leave()
        row.is_bar, row.left = True, now
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append(PrintedRow())
        if len(self._rows) > ROWS:
            yield from self._end_first()

    def _end_first(self) -> list[bytes]:
        """Remove the first row, which the cursor has left. Returns its line, if any."""
        self._cursor -= 1
        return self._state_of(self._rows.pop(0))

    def _state_of(self, row: PrintedRow) -> list[bytes]:
        """Return the line that a row shows, in a list; an empty list if the row shows nothing new."""
        if not row.text.strip() or row.text == row.given:
            return []
        row.given = row.text
        return [row.text]

    def _cut(self) -> list[bytes]:
        row, parts = self._rows[self._cursor], []
        while len(row.drawn) > LINE_LIMIT:
            parts.append(row.drawn[:LINE_LIMIT])
            row.drawn = row.drawn[LINE_LIMIT:]
        return parts
