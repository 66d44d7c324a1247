"""Records in a timeline when the GPU averaged which tensors, by the host's clock."""

from __future__ import annotations

import json
from collections import deque
from time import perf_counter
from typing import Any

import torch

_MOST = 4096
"""Largest number of averages that wait until the GPU has finished them; beyond this the oldest are dropped from the
timeline."""


class GpuTrack:
    """Events of one GPU for the timeline. The training thread calls `add`; the timeline's thread calls `drain`, which
    also compares the host's and the GPU's clocks, so that the training thread need not wait for the GPU."""

    def __init__(self, device: torch.device, rank: int, track: int, origin: float) -> None:
        """track: number of the track in the trace. origin: perf_counter at the beginning of the trace."""
        self._about = {"ph": "X", "pid": rank, "tid": track, "cat": "gpu"}
        self._origin = origin
        self._added: deque[tuple[str, Any, Any]] = deque(maxlen=_MOST)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._mark, self._at = self._compare()

    def add(self, name: str, began: Any, ended: Any) -> None:
        """Record a named operation between two CUDA events, which the GPU may not have reached yet."""
        self._added.append((name, began, ended))

    def drain(self) -> bytes:
        """Return the operations that the GPU has finished, as lines of a trace."""
        lines = []
        while self._added and self._added[0][2].query():
            name, began, ended = self._added.popleft()
            begin, end = (self._at + 1e-3 * self._mark.elapsed_time(each) for each in (began, ended))
            event = {"ts": _microseconds(begin - self._origin), "dur": _microseconds(end - begin), **self._about}
            lines.append(json.dumps({**event, "name": name}, separators=(",", ":")).encode() + b",\n")
        self._mark, self._at = self._compare()
        return b"".join(lines)

    def _compare(self) -> tuple[Any, float]:
        """Record an event on the GPU and wait for it. Returns the event and the host's time. Repeated regularly, as the
        clocks drift apart by microseconds per second."""
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(self._stream)
        mark.synchronize()
        return mark, perf_counter()


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
