"""Reusable threads that make blocking calls of libraries, so that other threads need not wait for these calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import monotonic


class Waiters:
    """Pool of threads for blocking waits, with as many threads as waits at the same time. Threads are reused, because
    memory that Gloo allocates for each waiting thread is never freed."""

    def __init__(self, name: str) -> None:
        """name: the name of all threads in the pool."""
        self._name = name
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._closed = False

    def run(self, job: Callable[[], None]) -> None:
        """Run `job` on a thread of the pool without waiting for its end. job: must not raise exceptions."""
        if self._closed:
            threading.Thread(target=job, name=self._name, daemon=True).start()
            return
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._jobs.put(job)

    def close(self, timeout: float = 0.0) -> None:
        """End the threads as soon as their jobs are done. timeout: seconds to wait for the threads to end."""
        self._closed = True
        self._jobs.put(None)
        deadline = monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # otherwise the variable keeps the job's tensors alive
            self._idle.release()
        self._jobs.put(None)  # the end mark (None) is passed on to the next thread of the pool
