"""Why a worker makes no steps, according to the kernel: stopped, traced, hanging, swapping, or busy."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

STILL_SECONDS = 2.0
"""A worker that has made no step for this long is inspected."""
SWAPPING_FAULTS = 100.0
"""Major page faults per second from which a worker counts as swapping."""
SWAPPED_BYTES = 16 << 20
BUSY_SHARE = 0.5
"""Share of a core from which a worker counts as busy."""

TEXTS = {
    "stopped": "is stopped (SIGSTOP, {place}; kill -CONT {pid} lets it go on)",
    "traced": "is held by a debugger ({place})",
    "hanging": "hangs in the kernel, in a device or a file server ({place})",
    "swapping": "is swapping: memory is short ({place})",
    "busy": "computes ({place})",
}
"""Ends of a sentence that begins with the rank."""
HELD = {
    "stopped": "it was stopped (SIGSTOP)",
    "traced": "a debugger held it",
    "hanging": "it hung in the kernel, in a device or a file server",
    "swapping": "it was swapping, as memory was short",
}
"""Conditions that keep a rank from going on, in the past tense. A busy rank is only slow, so it is not here."""


class Look(NamedTuple):
    """A sample of a process at a time (time.monotonic)."""

    at: float
    letter: str
    faults: int
    ticks: int
    hanging: frozenset[int]
    """Threads in uninterruptible sleep."""


class Conditions:
    """The conditions of one host's workers. Most need two samples, so the first look tells only stopped or traced."""

    def __init__(self) -> None:
        self._looks: dict[int, Look] = {}

    def look(self, still: Mapping[int, int]) -> dict[str, str]:
        """still: rank to pid of the workers that make no steps. Returns rank to a key of TEXTS, if one is known."""
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
    if (now.faults - before.faults) / seconds > SWAPPING_FAULTS and _swapped(pid) > SWAPPED_BYTES:
        return "swapping"
    if now.hanging & before.hanging:
        return "hanging"
    busy = (now.ticks - before.ticks) / os.sysconf("SC_CLK_TCK") / seconds
    return "busy" if busy > BUSY_SHARE else ""


def _look(pid: int) -> Look | None:
    """A sample of the process; None once it is gone."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    if not fields:
        return None
    threads = ((task.name, _stat(task / "stat")) for task in _tasks(pid))
    hanging = frozenset(int(name) for name, thread in threads if thread and thread[0] == "D")
    return Look(time.monotonic(), fields[0], int(fields[9]), int(fields[11]) + int(fields[12]), hanging)


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []  # the process has just ended


def _stat(path: Path) -> list[str]:
    """The fields of a stat file from the process state on."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []  # it has just ended


def _swapped(pid: int) -> int:
    """Bytes of its memory that are on disk."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0  # it has just ended
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmSwap:")), 0)
