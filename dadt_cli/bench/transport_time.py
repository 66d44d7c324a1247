"""Measures the processor time that a process spends on moving data between ranks, if it has threads for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dadt.config.extensions import EXECUTORS

NAMES = {
    # threads of DADT: C++ engines, messages between two ranks, and executors in Python
    *("dadt", "dadt-mail", "dadt-hierarchical", *(f"dadt-{name}" for name in EXECUTORS)),
    # threads of Gloo, as torch starts it
    *("gloo_tcp_loop", "pt_gloo_runloop"),
}
"""Names of threads that only move data between ranks and sum it."""
TASKS = Path("/proc/self/task")


class TransportThreads:
    """Measures the processor time of this process's threads that move data between ranks, without threads that
    compute."""

    def __init__(self) -> None:
        self._others: set[int] = set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Count also the threads that are started in this block, for a library that does not name its threads; they
        replace those of an earlier block."""
        before = set(_threads())
        yield
        self._others = set(_threads()) - before

    def seconds(self) -> Mapping[int, float]:
        """Return the processor seconds that each thread that moves data has used so far, by thread id."""
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        found = {}
        for number, name in _threads().items():
            if number in self._others or name in NAMES or python.get(number) in NAMES:
                try:
                    found[number] = int((TASKS / str(number) / "schedstat").read_text().split()[0]) / 1e9
                except OSError:
                    continue  # the thread has just ended, or the kernel has no scheduling statistics
        return found


def between(before: Mapping[int, float], after: Mapping[int, float]) -> float | None:
    """Return the processor seconds that threads have used between two results of TransportThreads.seconds; None if
    there are no such threads."""
    if not after:
        return None
    return sum(seconds - before.get(number, 0.0) for number, seconds in after.items())


def _threads() -> dict[int, str]:
    """Return the names of this process's threads in the kernel, by thread id."""
    found = {}
    for task in TASKS.iterdir():
        try:
            found[int(task.name)] = (task / "comm").read_text().strip()
        except OSError:
            continue  # the thread has just ended
    return found
