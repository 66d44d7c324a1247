"""Lines that all ranks print alike, to be shown once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

MOMENT_SECONDS = 1.0
"""How long a rank's line waits for the same one of all others."""
WAITING = 1000
"""Lines of a rank that may wait."""
NEVER = float("inf")


class Alike:
    """The lines of one stream of all ranks. The order of each rank's lines stays."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._waiting: dict[int, deque[tuple[float, bytes]]] = {rank: deque() for rank in ranks}
        """Each rank's lines that have not been shown, with the times at which they came."""
        self._ended: set[int] = set()

    def add(self, rank: int, lines: Iterable[bytes], now: float) -> None:
        self._ended.discard(rank)
        self._waiting[rank].extend((now, line) for line in lines)

    def end(self, rank: int) -> None:
        """Nobody waits for it until it prints again, in a new worker."""
        self._ended.add(rank)

    def due(self) -> float:
        """Time at which the first line has waited long enough; infinite if none waits."""
        return min((lines[0][0] + MOMENT_SECONDS for lines in self._waiting.values() if lines), default=NEVER)

    def take(self, now: float) -> Iterator[tuple[list[int], bytes]]:
        """Ranks and the line that they have printed, of lines that need not wait any longer; all where now is
        infinite."""
        while any(self._waiting.values()):
            present = [rank for rank, lines in self._waiting.items() if lines or rank not in self._ended]
            first = self._waiting[present[0]]
            if first and all(lines and lines[0][1] == first[0][1] for lines in map(self._waiting.__getitem__, present)):
                yield present, self._next(present)
            elif (rank := self._impatient(present, now)) is None:
                return
            else:
                yield from self._of(rank, [each for each in present if each != rank])

    def _impatient(self, present: list[int], now: float) -> int | None:
        """A rank whose first line waits no longer; None if there is none."""
        if full := [rank for rank in present if len(self._waiting[rank]) > WAITING]:
            return full[0]
        since, rank = min((self._waiting[rank][0][0], rank) for rank in present if self._waiting[rank])
        return rank if since + MOMENT_SECONDS <= now else None

    def _of(self, rank: int, others: list[int]) -> Iterator[tuple[list[int], bytes]]:
        """This rank's first line, or what others have printed before the same one."""
        line = self._waiting[rank][0][1]
        if not all(any(line == other for _, other in self._waiting[each]) for each in others):
            yield [rank], self._next([rank])
            return
        for each in others:
            while self._waiting[each][0][1] != line:
                yield [each], self._next([each])

    def _next(self, ranks: list[int]) -> bytes:
        for rank in ranks:
            _, line = self._waiting[rank].popleft()
        return line
