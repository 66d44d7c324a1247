"""Handles the workers' output: writes all of it to one file per rank, and shows the part that the user has chosen on
the console."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

from dadt.config import numbers as lists
from dadt.control import private_files
from dadt.errors import ConfigError
from dadt.launch.monitor.alike import Alike
from dadt.launch.monitor.log_files import log_path
from dadt.launch.monitor.printed import BAR_SECONDS, NEVER, Printed

ONCE = "once"
"""The value of `--output` with which a line that all ranks print alike is shown only once."""

Sink = Callable[[str, bytes], None]
"""Function that is called with "out" or "err" and one or more complete lines, and shows these on the console."""


def ranks_shown(text: str, world_size: int) -> tuple[set[int], set[str]]:
    """Return the ranks and the streams whose output the value of `--output` (once, all, rank0, errors, or ranks such as
    0,3-5) selects. Raises ConfigError."""
    everyone = set(range(world_size))
    if text in (ONCE, "all", "errors"):
        return everyone, {"err"} if text == "errors" else {"out", "err"}
    ranks = lists.numbers("0" if text == "rank0" else text)
    if ranks is None:
        raise ConfigError(f"--output {text}: give once, all, rank0, errors, or ranks as 0,3-5")
    if not ranks & everyone:
        raise ConfigError(f"--output {text}: there is no such rank among {world_size}, they count from 0")
    return ranks, {"out", "err"}


class Output:
    """Writes everything that a rank prints to the rank's file unchanged. The lines that are to be shown go to the
    console, with a prefix that names the rank."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        wish: str,
        sink: Sink,
        warn: Callable[[str], None],
        bars_move: Callable[[], bool],
    ) -> None:
        """folder: an existing folder for the files. hosts: name of each rank's host. wish: value of `--output`; raises
        ConfigError if it is wrong. sink: called with the lines to show. warn: called with a text if a file cannot be
        written. bars_move: returns whether a live view shows progress bars moving, so that only their last states go to
        the console."""
        self.folder = folder
        self._ranks, self._streams = ranks_shown(wish, len(hosts))
        self._sink = sink
        self._warn = warn
        self._bars_move = bars_move
        self._files: dict[int, IO[bytes] | None] = {}
        self._printed: dict[tuple[int, str], Printed] = {}
        self._alike = {stream: Alike(range(len(hosts))) for stream in self._streams if wish == ONCE and hosts[1:]}
        self._many = len(set(hosts)) > 1
        self._prefixes = [f"[{rank} {host}] " if self._many else f"[{rank}] " for rank, host in enumerate(hosts)]
        for rank in range(len(hosts)):
            self._open(rank).close()

    def move(self, rank: int, host: str) -> None:
        """Record that the rank runs on another host from now on, which the prefix of its lines names."""
        if self._many:
            self._prefixes[rank] = f"[{rank} {host}] "

    def end(self, rank: int) -> None:
        """Record that the rank's worker has ended, so that lines of other ranks do not wait for it."""
        for alike in self._alike.values():
            alike.end(rank)

    def _open(self, rank: int) -> IO[bytes]:
        return private_files.open_file(log_path(self.folder, rank), "ab", inner=True, buffering=0)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        self._log(rank, data)
        if rank in self._ranks and stream in self._streams:
            printed = self._printed.setdefault((rank, stream), Printed())
            now = time.monotonic()
            if stream == "out" and (bars := self._printed.get((rank, "err"))) is not None:
                self._add(rank, "err", bars.settle(), now)
                self._show("err", now)
            self._add(rank, stream, printed.feed(data, now, self._every), now)
            self._show(stream, now)

    def note(self, text: str) -> None:
        """Write a line of DADT to the output files of all ranks."""
        for rank in range(len(self._prefixes)):
            self._log(rank, text.encode() + b"\n")

    def tick(self) -> float:
        """Show everything that is due: the states of progress bars, and lines that have waited long enough for the same
        lines of other ranks. Returns the seconds until the next call is due."""
        now, every = time.monotonic(), self._every
        for (rank, stream), printed in self._printed.items():
            self._add(rank, stream, printed.tick(now, every), now)
        for stream in self._streams:
            self._show(stream, now)
        bars = min((each.due(every) for each in self._printed.values()), default=NEVER)
        return min(bars, *(alike.due() for alike in self._alike.values()), NEVER) - now

    def close(self) -> None:
        """Show lines that are still unfinished, and close the files. Idempotent."""
        now = time.monotonic()
        for (rank, stream), printed in self._printed.items():
            self._add(rank, stream, printed.finish(), now)
        for stream in self._streams:
            self._show(stream, NEVER)
        for file in self._files.values():
            if file is not None:
                file.close()
        self._files.clear()

    @property
    def _every(self) -> float:
        return NEVER if self._bars_move() else BAR_SECONDS

    def _add(self, rank: int, stream: str, lines: list[bytes], now: float) -> None:
        if not lines:
            return
        if stream in self._alike:
            self._alike[stream].add(rank, lines, now)
        else:
            self._put(stream, ((self._prefixes[rank], line) for line in lines))

    def _show(self, stream: str, now: float) -> None:
        if stream in self._alike and (taken := list(self._alike[stream].take(now))):
            self._put(stream, ((self._prefix(ranks), line) for ranks, line in taken))

    def _prefix(self, ranks: list[int]) -> str:
        return f"[{lists.text(ranks)}] " if ranks[1:] else self._prefixes[ranks[0]]

    def _put(self, stream: str, lines: Iterable[tuple[str, bytes]]) -> None:
        # The library rich fills each line with spaces up to the console's width. Behind the prefix they would wrap onto
        # another row.
        self._sink(stream, b"".join(prefix.encode() + line.rstrip(b" \r") + b"\n" for prefix, line in lines))

    def _log(self, rank: int, data: bytes) -> None:
        try:
            if rank not in self._files:
                self._files[rank] = self._open(rank)
            file = self._files[rank]
            if file is not None:
                file.write(data)
        except OSError as error:
            self._files[rank] = None
            self._warn(f"{log_path(self.folder, rank)} is incomplete: {error.strerror}")
