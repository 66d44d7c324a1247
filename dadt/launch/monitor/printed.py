r"""The lines of what a worker prints, where progress bars redraw themselves.

A bar goes back to the beginning of its row and draws over it (\r, \b, or an escape sequence that erases); nested bars
move the cursor down and up again between rows. As on a terminal, only the last state of a row stays.

Where the cursor is hidden, as by rich, it may rest below bars that will be drawn again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

BAR_SECONDS = 30.0
"""Time between two lines that show the same progress bar, where it is not seen as it moves."""
LEFT_SECONDS = 0.1
"""A bar that the cursor has left has ended, unless it returns within this time, as nested ones make it do."""
HIDDEN_SECONDS = 1.0
"""The time in place of LEFT_SECONDS for the first lines under a hidden cursor, which may be bars or not."""
LINE_LIMIT = 1 << 16
"""Bytes after which a line without an end is cut."""
ROWS = 64
"""Rows that a worker may redraw at once."""
NEVER = float("inf")
BAR = re.compile(rb"%\||\xe2\x94\x81|\xe2\x96[\x88-\x8f]")
"""In the text of a bar: those of tqdm, and the blocks and lines with which it and others are drawn."""
MOVES = re.compile(rb"\r+\n|\n|\r|\x08+|\x1b\[\??([0-9;]{0,9})([ABEFGKhl])")
UNFINISHED = re.compile(rb"\r\Z|\x1b(?:\[\??[0-9;]{0,9})?\Z")
"""At the end of a piece: what comes next decides what it is."""


@dataclass(slots=True)
class PrintedRow:
    """A line that has no end yet, or that may still be redrawn."""

    drawn: bytes = b""
    """What has been written to it since its beginning was last gone back to."""
    state: bytes = b""
    """What the row showed before its beginning was last gone back to."""
    is_bar: bool = False
    since: float = NEVER
    """Time at which the bar appeared or was last given out."""
    given: bytes = b""
    """The state in which it was last given out."""
    left: float = NEVER
    """Time at which the cursor left it downwards."""

    @property
    def text(self) -> bytes:
        """The row as a terminal shows it."""
        return self.drawn if self.drawn.strip() else self.state

    def go_back(self) -> None:
        """To its beginning, over which the next text is drawn. One that is drawn over with spaces is a bar's no more:
        what comes next may be a line of its own."""
        self.is_bar = not self.drawn or bool(self.drawn.strip())
        self.state = self.text if self.is_bar else b""
        self.drawn = b""

    def leave(self) -> None:
        """The cursor goes to another row. One that was drawn over with spaces is empty."""
        if self.drawn and not self.drawn.strip():
            self.drawn = self.state = b""

    def erase(self, whole: bool) -> None:
        """What was there before, or the whole row."""
        self.drawn, self.state, self.is_bar = b"" if whole else self.drawn, b"", True


class Printed:
    """Turns the bytes of one stream into complete lines. Nothing is decoded, so bytes stay as they are."""

    def __init__(self) -> None:
        self._rest = b""
        """The unfinished end of the last piece of output."""
        self._rows = [PrintedRow()]
        self._cursor = 0
        self._hidden = False
        """Whether the stream has hidden the terminal's cursor."""
        self._raised = -NEVER
        """Time at which the cursor last went up, since it was hidden or shown."""

    def feed(self, data: bytes, now: float, every: float = BAR_SECONDS) -> list[bytes]:
        """The lines that are complete. every: seconds between two states of a bar."""
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
        """Lines that are due by now: those of rows that have ended, and bars that were not given out for `every`
        seconds."""
        lines = []
        while self._ends() <= now:
            lines += self._end_first()
        for row in self._rows:
            if row.is_bar and row.since + every <= now:
                lines += self._state_of(row)
                row.since = now
        return lines

    def due(self, every: float = BAR_SECONDS) -> float:
        """Time at which `tick` has something to do; infinite if there is none."""
        return min(self._ends(), *(row.since + every for row in self._rows if row.is_bar), NEVER)

    def settle(self) -> list[bytes]:
        """Bars above an empty row: they have ended, as the process has gone on to write to another stream."""
        lines = []
        while self._cursor and not self._hidden and not self._rows[self._cursor].text:
            lines += self._end_first()
        return lines

    def finish(self) -> list[bytes]:
        """The last lines of the stream, which have no end."""
        lines = [line for row in self._rows for line in self._state_of(row)]
        self._rows, self._cursor, self._rest = [PrintedRow()], 0, b""
        return lines

    def _ends(self) -> float:
        """Time at which the first row has ended. Under a hidden cursor that is once only rows below it are redrawn."""
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
        # A line of its own: what stands above it is not drawn again.
        while self._cursor:
            yield from self._end_first()
        if row.drawn.strip() or not row.given:  # the end of a line whose text was a bar's, is none
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
        """The first row, which the cursor has left."""
        self._cursor -= 1
        return self._state_of(self._rows.pop(0))

    def _state_of(self, row: PrintedRow) -> list[bytes]:
        """The line that a row shows; empty where it shows nothing new."""
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
