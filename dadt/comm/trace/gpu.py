"""When a GPU has averaged what, in the host's time."""

from __future__ import annotations

import json
from collections import deque
from time import perf_counter
from typing import Any

import torch

_MOST = 4096
"""Averages that the GPU may be behind with; older ones are left out."""


class GpuTrack:
    """`add` is the training thread's, `drain` the timeline's: the host's time is compared with the GPU's there, so that
    nobody else waits for it."""

    def __init__(self, device: torch.device, rank: int, track: int, origin: float) -> None:
        """track: in the trace. origin: its beginning, of perf_counter."""
        self._about = {"ph": "X", "pid": rank, "tid": track, "cat": "gpu"}
        self._origin = origin
        self._added: deque[tuple[str, Any, Any]] = deque(maxlen=_MOST)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._mark, self._at = self._compare()

    def add(self, name: str, began: Any, ended: Any) -> None:
        """Events of the GPU's around what it does, which may not have come yet."""
        self._added.append((name, began, ended))

    def drain(self) -> bytes:
        """The events that have come, as lines of a trace."""
        lines = []
        while self._added and self._added[0][2].query():
            name, began, ended = self._added.popleft()
            begin, end = (self._at + 1e-3 * self._mark.elapsed_time(each) for each in (began, ended))
            event = {"ts": _microseconds(begin - self._origin), "dur": _microseconds(end - begin), **self._about}
            lines.append(json.dumps({**event, "name": name}, separators=(",", ":")).encode() + b",\n")
        self._mark, self._at = self._compare()
        return b"".join(lines)

    def _compare(self) -> tuple[Any, float]:
        """An event, and the host's time when it came. The clocks part by microseconds in a second."""
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(self._stream)
        mark.synchronize()
        return mark, perf_counter()


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
