"""The workers' output: complete in a file per rank, and readable on the console."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dadt.config.numbers import numbers
from dadt.control import private_files
from dadt.errors import ConfigError

BAR_SECONDS = 0.5
"""Least time between two lines shown of a progress bar, which redraws itself after a carriage return."""
LINE_LIMIT = 1 << 16
TAIL_BYTES = 1 << 14

Sink = Callable[[str, bytes], None]
"""Takes "out" or "err" and one or more complete lines."""


def ranks_shown(text: str, world_size: int) -> tuple[set[int], set[str]]:
    """The ranks and the streams that `--output` names: all, rank0, errors, or ranks as 0,3-5. Raises ConfigError."""
    everyone = set(range(world_size))
    if text in ("all", "errors"):
        return everyone, {"err"} if text == "errors" else {"out", "err"}
    ranks = numbers("0" if text == "rank0" else text)
    if ranks is None:
        raise ConfigError(f"--output {text}: give all, rank0, errors, or ranks as 0,3-5")
    if not ranks & everyone:
        raise ConfigError(f"--output {text}: there is no such rank among {world_size}, they count from 0")
    return ranks, {"out", "err"}


class Assembler:
    """Turns the bytes of one stream into complete lines. Nothing is decoded, so the bytes stay as they are."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._bar = b""
        """The last state of a progress bar, if it was not shown yet."""
        self._bar_shown = 0.0
        self._is_bar = False
        """Whether the unfinished line was redrawn at least once."""

    def feed(self, data: bytes, now: float) -> list[bytes]:
        *complete, rest = data.split(b"\n")
        lines = []
        for part in complete:
            line = _last_state(bytes(self._line) + part, self._bar)
            if line or not self._is_bar:
                lines.append(line)
            self._line.clear()
            self._bar = b""
            self._is_bar = False
        self._line += rest
        bar, carriage, drawn = bytes(self._line).rpartition(b"\r")
        if carriage:
            self._bar = _last_state(bar, self._bar)
            self._line[:] = drawn
            self._is_bar = True
        lines.extend(self.tick(now))
        while len(self._line) > LINE_LIMIT:
            lines.append(bytes(self._line[:LINE_LIMIT]))
            del self._line[:LINE_LIMIT]
        return lines

    def tick(self, now: float) -> list[bytes]:
        """The progress bar, if it is due."""
        if not self._bar or now < self.due:
            return []
        line, self._bar, self._bar_shown = self._bar, b"", now
        return [line]

    @property
    def due(self) -> float:
        """Time at which the bar is due; infinite if there is none."""
        return self._bar_shown + BAR_SECONDS if self._bar else float("inf")

    def finish(self) -> list[bytes]:
        """The last line of the stream, if it has no end of line."""
        rest = _last_state(bytes(self._line), self._bar)
        self._line.clear()
        self._bar = b""
        return [rest] if rest else []


def _last_state(line: bytes, before: bytes) -> bytes:
    r"""The text that a terminal would show of a line in which each \r starts to draw over the part before."""
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), before or line.strip(b"\r"))


@dataclass(slots=True)
class Tail:
    """The last bytes that a rank wrote to stderr."""

    data: bytes = b""

    def feed(self, data: bytes) -> None:
        self.data = (self.data + data)[-TAIL_BYTES:]


class Output:
    """Writes everything to the rank's file unchanged, and the chosen part to the console with a prefix per line."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        shown: tuple[set[int], set[str]],
        sink: Sink,
        warn: Callable[[str], None],
    ) -> None:
        """folder: an existing folder. hosts: name of each rank's host. shown: the result of `ranks_shown`.

        warn: called with a text about a log that cannot be written.
        """
        self.folder = folder
        self._ranks, self._streams = shown
        self._sink = sink
        self._warn = warn
        self._files: dict[int, IO[bytes] | None] = {}
        self._assemblers: dict[tuple[int, str], Assembler] = {}
        self._many = len(set(hosts)) > 1
        self._prefixes = [f"[{rank} {host}] " if self._many else f"[{rank}] " for rank, host in enumerate(hosts)]
        self.tails = {rank: Tail() for rank in range(len(hosts))}
        for rank in range(len(hosts)):
            self._open(rank).close()

    def move(self, rank: int, host: str) -> None:
        """The rank is on this host from now on."""
        if self._many:
            self._prefixes[rank] = f"[{rank} {host}] "

    def path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def stacks(self, rank: int) -> Path:
        """The file for the rank's stacks, if they are written."""
        return self.folder / f"rank{rank}.stacks"

    def _open(self, rank: int) -> IO[bytes]:
        return private_files.open_file(self.path(rank), "ab", inner=True, buffering=0)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        self._log(rank, data)
        if stream == "err":
            self.tails[rank].feed(data)
        if rank in self._ranks and stream in self._streams:
            assembler = self._assemblers.setdefault((rank, stream), Assembler())
            self._show(rank, stream, assembler.feed(data, time.monotonic()))

    def note(self, text: str) -> None:
        """Write a line into all files."""
        for rank in self.tails:
            self._log(rank, text.encode() + b"\n")

    def tick(self) -> float:
        """Show the progress bars that are due. Returns the seconds until the next one is."""
        now = time.monotonic()
        for (rank, stream), assembler in self._assemblers.items():
            self._show(rank, stream, assembler.tick(now))
        return min((each.due for each in self._assemblers.values()), default=float("inf")) - now

    def close(self) -> None:
        """Show unfinished lines, and close the files. Idempotent."""
        for (rank, stream), assembler in self._assemblers.items():
            self._show(rank, stream, assembler.finish())
        for file in self._files.values():
            if file is not None:
                file.close()
        self._files.clear()

    def _show(self, rank: int, stream: str, lines: list[bytes]) -> None:
        if lines:
            prefix = self._prefixes[rank].encode()
            self._sink(stream, b"".join(prefix + line.rstrip(b"\r") + b"\n" for line in lines))

    def _log(self, rank: int, data: bytes) -> None:
        try:
            if rank not in self._files:
                self._files[rank] = self._open(rank)
            file = self._files[rank]
            if file is not None:
                file.write(data)
        except OSError as error:
            self._files[rank] = None
            self._warn(f"{self.path(rank)} is incomplete: {error.strerror}")
