"""Writes `progress.jsonl`: samples of each rank's progress, at first every 0.5 s and later less often, so that the size
of the file is limited."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import IO

from dadt.control import private_files
from dadt.launch.monitor.watch import Gauge, Watch

SECONDS = 0.5
"""Seconds between two samples at the beginning of the job."""
MOMENTS = 8192
"""Largest number of samples that are stored of each rank in a job of one or two ranks. With more ranks, fewer samples
of each are stored, so that the total stays the same."""
LEAST = 256
"""Minimum number of samples that are stored of each rank, however many ranks there are."""


class Series:
    """Writes a line for each rank at each sample. When the file is full, every second sample is removed and the time
    between samples doubles. No progress is lost by this, since the figures of each line count from the beginning of the
    job."""

    def __init__(self, path: Path, watch: Watch, warn: Callable[[str], None]) -> None:
        """warn: called once, with a text for the user, if the file cannot be written."""
        self._path = path
        self._watch = watch
        self._warn = warn
        self._most = max(LEAST, 2 * MOMENTS // max(2, len(watch.gauges)))
        self._seconds = SECONDS
        self._due = 0.0
        self._file: IO[bytes] | None = None
        self._ends: list[int] = []
        """Offset in the file at which each sample ends."""
        self._broken = False

    def tick(self) -> float:
        """Write a sample of each rank if one is due. Returns the seconds until the next sample."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._seconds
            self._write()
        return self._due - now

    def close(self) -> None:
        """Write a last sample of each rank, and close the file. Idempotent."""
        self._write()
        self._broken = True
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        lines = b"".join(map(_line, self._watch.gauges))
        if self._broken or not lines:
            return
        try:
            if self._file is None:
                self._file = private_files.open_file(self._path, inner=True, buffering=0)
            if len(self._ends) == self._most:
                self._thin()
            self._file.write(lines)
            self._ends.append(self._file.tell())
        except OSError as error:
            self._broken = True
            self._warn(f"{self._path} is incomplete: {error.strerror}")

    def _thin(self) -> None:
        """Remove every second sample. The file is replaced atomically, as other programs may be reading it."""
        assert self._file is not None
        content = self._path.read_bytes()
        moments = [content[a:b] for a, b in zip([0, *self._ends], self._ends, strict=False)][1::2]
        other = self._path.with_name(f"{self._path.name}.new")
        file = private_files.open_file(other, inner=True, buffering=0)
        file.write(b"".join(moments))
        self._file.close()
        other.replace(self._path)
        self._file, self._seconds = file, 2 * self._seconds
        self._ends = list(accumulate(map(len, moments)))


def _line(gauge: Gauge) -> bytes:
    """Return a rank's line for the file; empty while the rank has not reported a step."""
    mark = gauge.last
    if mark is None:
        return b""
    told = {
        "time": round(time.time(), 3),
        "rank": gauge.rank,
        "step": mark.step,
        "samples": mark.samples,
        "waited": round(mark.waited, 6),
        "clock": round(mark.clock, 6),
        "sent": gauge.numbers.get("sent", 0),
        "memory": gauge.memory,
    }
    return json.dumps(told).encode() + b"\n"
