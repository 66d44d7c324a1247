"""Finds out from the kernel why a worker makes no steps: stopped, traced, hanging, swapping, or busy."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dadt.control.proc import stat_fields, status

STILL_SECONDS = 2.0
"""Seconds without a step after which a worker is inspected."""
SWAPPING_FAULTS = 100.0
"""Major page faults per second from which a worker counts as swapping."""
SWAPPED_KIB = 16 << 10
BUSY_SHARE = 0.5
"""Share of a processor core from which a worker counts as busy."""

TEXTS = {
    "stopped": "is stopped (SIGSTOP, {place}; kill -CONT {pid} lets it go on)",
    "traced": "is held by a debugger ({place})",
    "hanging": "hangs in the kernel, in a device or a file server ({place})",
    "swapping": "is swapping: memory is short ({place})",
    "busy": "computes ({place})",
}
"""Text for each condition, such as "computes (host1)", which continues a sentence that begins with the rank."""
HELD = {
    "stopped": "it was stopped (SIGSTOP)",
    "traced": "a debugger held it",
    "hanging": "it hung in the kernel, in a device or a file server",
    "swapping": "it was swapping, as memory was short",
}
"""Text in the past tense for each condition that prevents a rank from continuing. "busy" is not included, since a busy
rank is only slow."""


class Look(NamedTuple):
    """Sample of a process's state at one moment (`at`, by time.monotonic)."""

    at: float
    letter: str
    faults: int
    ticks: int
    hanging: frozenset[int]
    """Ids of the threads in uninterruptible sleep."""


class Conditions:
    """Finds the conditions of one host's workers. Most conditions need two samples, so the first inspection finds only
    stopped or traced workers."""

    def __init__(self) -> None:
        self._looks: dict[int, Look] = {}

    def look(self, still: Mapping[int, int]) -> dict[str, str]:
        """Inspect the workers that make no steps. still: maps rank to pid. Returns a mapping from rank to a key of
        TEXTS, for ranks whose condition is known."""
        looks = {pid: look for pid in still.values() if (look := _look(pid)) is not None}
        found = {str(rank): _judge(looks.get(pid), self._looks.get(pid), pid) for rank, pid in still.items()}
        self._looks = looks
        return {rank: kind for rank, kind in found.items() if kind}


def _judge(now: Look | None, before: Look | None, pid: int) -> str:
    if now is None:
        return ""
    if now.letter in "Tt":
        return "stopped" if now.letter == "T" else "traced"
    if before is None:
        return ""
    seconds = max(now.at - before.at, 1e-3)
    if (now.faults - before.faults) / seconds > SWAPPING_FAULTS and int(status(pid, "VmSwap") or 0) > SWAPPED_KIB:
        return "swapping"
    if now.hanging & before.hanging:
        return "hanging"
    busy = (now.ticks - before.ticks) / os.sysconf("SC_CLK_TCK") / seconds
    return "busy" if busy > BUSY_SHARE else ""


def _look(pid: int) -> Look | None:
    """Return a sample of the process; None if it has ended."""
    fields = stat_fields(Path(f"/proc/{pid}"))
    if not fields:
        return None
    threads = ((task.name, stat_fields(task)) for task in _tasks(pid))
    hanging = frozenset(int(name) for name, thread in threads if thread and thread[0] == "D")
    return Look(time.monotonic(), fields[0], int(fields[9]), int(fields[11]) + int(fields[12]), hanging)


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []  # the process has just ended, so its folder in /proc is gone
