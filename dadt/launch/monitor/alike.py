"""Lines that all ranks print alike, to be shown once: progress bars may differ in how far they are, and how fast."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dadt.launch.monitor.printed import BAR

MOMENT_SECONDS = 1.0
"""How long a rank's line waits for the same one of all others."""
WAITING = 1000
"""Most lines of a rank that may wait."""
NEVER = float("inf")
PACE = re.compile(rb" *(?:\d+%\|[^|]*\| *[\d.]+(?=/)|\d+(?::\d\d)+|(?<=<)\?|[\d.?]+(?:m?s/\w+|\w+/s|m?s\b))")
"""Matches what ranks show differently in a progress bar: how far it is, times, and its speed."""


class PrintedLine(NamedTuple):
    since: float
    """Time at which the line came."""
    text: bytes
    meaning: bytes
    """The part of the text that is compared with other ranks' lines: of a progress bar all but its figures."""
    is_bar: bool

    @classmethod
    def of(cls, text: bytes, now: float) -> PrintedLine:
        is_bar = BAR.search(text) is not None
        return cls(now, text, PACE.sub(b"", text) if is_bar else text, is_bar)


class Alike:
    """The lines of one stream of all ranks. The order of each rank's lines stays."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._waiting: dict[int, deque[PrintedLine]] = {rank: deque() for rank in ranks}
        """Each rank's lines that have not been shown."""
        self._ended: set[int] = set()

    def add(self, rank: int, lines: Iterable[bytes], now: float) -> None:
        self._ended.discard(rank)
        self._waiting[rank].extend(PrintedLine.of(line, now) for line in lines)

    def end(self, rank: int) -> None:
        """Nobody waits for it until it prints again, in a new worker."""
        self._ended.add(rank)

    def due(self) -> float:
        """Time at which the first line has waited long enough; infinite if none waits."""
        return min((lines[0].since + MOMENT_SECONDS for lines in self._waiting.values() if lines), default=NEVER)

    def take(self, now: float) -> Iterator[tuple[list[int], bytes]]:
        """Ranks and the line that they have printed, of lines that need not wait any longer; all where now is
        infinite."""
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
        """Whether a bar is each rank's next line, and no two are alike, as where each shows its loss."""
        firsts = [lines[0] for rank in present if (lines := self._waiting[rank])]
        return len({line.meaning for line in firsts if line.is_bar}) == len(present)

    def _impatient(self, present: list[int], now: float) -> int | None:
        """A rank whose first line waits no longer; None if there is none."""
        if full := [rank for rank in present if len(self._waiting[rank]) > WAITING]:
            return full[0]
        since, rank = min((self._waiting[rank][0].since, rank) for rank in present if self._waiting[rank])
        return rank if since + MOMENT_SECONDS <= now else None

    def _of(self, rank: int, others: list[int]) -> Iterator[tuple[list[int], bytes]]:
        """This rank's first line, or what others have printed before the same one."""
        line = self._waiting[rank][0].meaning
        if not all(any(line == other.meaning for other in self._waiting[each]) for each in others):
            yield [rank], self._next([rank])
            return
        for each in others:
            while self._waiting[each][0].meaning != line:
                yield [each], self._next([each])

    def _next(self, ranks: list[int]) -> bytes:
        """Take the next line of each of these ranks. Returns it as the first of them has printed it."""
        first, *_ = [self._waiting[rank].popleft() for rank in ranks]
        return first.text
