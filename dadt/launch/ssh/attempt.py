"""Connects to many hosts in a pool of threads, and tries a second time after errors that may be temporary."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dadt.errors import LaunchError
from dadt.launch.channel import Channel
from dadt.launch.hosts.host import Host

AT_ONCE = 32
RETRY_SECONDS = (0.3, 1.5)
"""Bounds in seconds of the random pause before the second attempt. It is random so that clients that a server has
refused do not come back at the same time."""


class Transient(LaunchError):
    """An error that may not occur again if the connection is attempted a little later."""


class Attempts:
    """Runs attempts to connect in a few daemon threads, so that an attempt that hangs does not keep the process from
    ending."""

    def __init__(self, attempt: Callable[[Host, float], Channel]) -> None:
        """attempt: function that connects to a host before a deadline (time.monotonic), or raises LaunchError."""
        self._attempt = attempt
        self._waiting: queue.SimpleQueue[tuple[Host, Future[Channel]]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._deadline = 0.0

    def begin(self, hosts: Sequence[Host], seconds: float) -> list[Future[Channel]]:
        self._deadline = time.monotonic() + seconds
        futures: list[Future[Channel]] = [Future() for _ in hosts]
        for item in zip(hosts, futures, strict=True):
            self._waiting.put(item)
        for _ in range(min(AT_ONCE, len(hosts))):
            threading.Thread(target=self._work, name="dadt-ssh", daemon=True).start()
        return futures

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Do not begin further attempts. Idempotent."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                host, future = self._waiting.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._try_twice(host))
                except BaseException as error:  # noqa: BLE001 (the future passes any exception on to its owner)
                    future.set_exception(error)

    def _try_twice(self, host: Host) -> Channel:
        try:
            return self._attempt(host, self._deadline)
        except Transient:
            if self._closed.wait(random.uniform(*RETRY_SECONDS)):
                raise
            return self._attempt(host, self._deadline)


def left(deadline: float, limit: float) -> float:
    """Return the seconds until the deadline, at most `limit`. Raises LaunchError if the deadline has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise LaunchError("timeout: not connected within --start-timeout")
    return min(limit, seconds)
