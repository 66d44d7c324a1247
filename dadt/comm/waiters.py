"""Threads that wait for what a library does, so that nobody else has to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import monotonic


class Waiters:
    """Threads in which works are waited for: as many as wait at once. They are used again, as each one that waits in
    Gloo costs memory which is not given back."""

    def __init__(self, name: str) -> None:
        """name: of the threads."""
        self._name = name
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._closed = False

    def run(self, job: Callable[[], None]) -> None:
        """Soon, in one of them. job: raises nothing."""
        if self._closed:
            threading.Thread(target=job, name=self._name, daemon=True).start()
            return
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._jobs.put(job)

    def close(self, timeout: float = 0.0) -> None:
        """They end once nothing is waited for. timeout: seconds to wait for that."""
        self._closed = True
        self._jobs.put(None)
        deadline = monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds what was sent
            self._idle.release()
        self._jobs.put(None)  # for the next one
