"""Merges lines that all ranks print alike, so that each is shown once. Progress bars count as alike even if their
progress and speed differ."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dadt.launch.monitor.printed import BAR

MOMENT_SECONDS = 1.0
"""Largest number of seconds that a rank's line waits for all other ranks to print the same line."""
WAITING = 1000
"""Largest number of lines of one rank that may wait for the other ranks."""
NEVER = float("inf")
PACE = re.compile(rb" *(?:\d+%\|[^|]*\| *[\d.]+(?=/)|\d+(?::\d\d)+|(?<=<)\?|[\d.?]+(?:m?s/\w+|\w+/s|m?s\b))")
"""Matches the parts of a progress bar that differ between ranks: its progress, times, and speed."""


class PrintedLine(NamedTuple):
    since: float
    """Time (time.monotonic) at which the line was printed."""
    text: bytes
    meaning: bytes
    """The text that is compared with other ranks' lines: the whole line, or a progress bar without its figures."""
    is_bar: bool

    @classmethod
    def of(cls, text: bytes, now: float) -> PrintedLine:
        is_bar = BAR.search(text) is not None
        return cls(now, text, PACE.sub(b"", text) if is_bar else text, is_bar)


class Alike:
    """The lines of all ranks on one stream (stdout or stderr) that have not been shown yet. Lines of the same rank stay
    in their order."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._waiting: dict[int, deque[PrintedLine]] = {rank: deque() for rank in ranks}
        """Lines of each rank that have not been shown yet, by rank."""
        self._ended: set[int] = set()

    def add(self, rank: int, lines: Iterable[bytes], now: float) -> None:
        self._ended.discard(rank)
        self._waiting[rank].extend(PrintedLine.of(line, now) for line in lines)

    def end(self, rank: int) -> None:
        """Record that a rank has ended, so that lines do not wait for it until a new worker of the rank prints
        something."""
        self._ended.add(rank)

    def due(self) -> float:
        """Return the time at which the oldest line has waited long enough for other ranks; infinite if no line
        waits."""
        return min((lines[0].since + MOMENT_SECONDS for lines in self._waiting.values() if lines), default=NEVER)

    def take(self, now: float) -> Iterator[tuple[list[int], bytes]]:
        """Yield the lines that need not wait any longer for other ranks, each with the ranks that have printed it. If
        `now` is infinite, yields all lines."""
        while any(self._waiting.values()):
            present = [rank for rank, lines in self._waiting.items() if lines or rank not in self._ended]
            firsts = {lines[0].meaning if (lines := self._waiting[rank]) else None for rank in present}
            if len(firsts) == 1 and None not in firsts:
                yield present, self._next(present)
            elif self._have_bars_of_their_own(present):
                for each in present:
                    yield [each], self._next([each])
            elif (rank := self._impatient(present, now)) is None:
                return
            else:
                yield from self._of(rank, [each for each in present if each != rank])

    def _have_bars_of_their_own(self, present: list[int]) -> bool:
        """Return whether the next line of each rank is a progress bar but all of these differ, for example because each
        shows the loss of its rank."""
        firsts = [lines[0] for rank in present if (lines := self._waiting[rank])]
        return len({line.meaning for line in firsts if line.is_bar}) == len(present)

    def _impatient(self, present: list[int], now: float) -> int | None:
        """Return a rank whose first line need not wait any longer; None if there is none."""
        if full := [rank for rank in present if len(self._waiting[rank]) > WAITING]:
            return full[0]
        since, rank = min((self._waiting[rank][0].since, rank) for rank in present if self._waiting[rank])
        return rank if since + MOMENT_SECONDS <= now else None

    def _of(self, rank: int, others: list[int]) -> Iterator[tuple[list[int], bytes]]:
        """Yield this rank's first line alone if some other rank has not printed it. Otherwise yield the lines that the
        others have printed before it."""
        line = self._waiting[rank][0].meaning
        if not all(any(line == other.meaning for other in self._waiting[each]) for each in others):
            yield [rank], self._next([rank])
            return
        for each in others:
            while self._waiting[each][0].meaning != line:
                yield [each], self._next([each])

    def _next(self, ranks: list[int]) -> bytes:
        """Remove the next line of each of these ranks, and return it as the first of the ranks has printed it."""
        first, *_ = [self._waiting[rank].popleft() for rank in ranks]
        return first.text
