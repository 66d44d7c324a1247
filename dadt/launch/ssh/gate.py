"""Limits simultaneous log-ins at each server, because SSH servers by default refuse connections while ten clients have
not logged in yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dadt.launch.ssh.attempt import left

LOGINS = 6
"""Largest number of simultaneous log-ins at one server. It is smaller than the server's default limit (MaxStartups),
because other users may log in as well, and because a server counts a log-in for a little longer than its client does.
"""


class Gates:
    """Limits the simultaneous log-ins, for each server separately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[str, threading.Semaphore] = {}

    @contextmanager
    def passed(self, where: str, deadline: float) -> Iterator[None]:
        """Context manager that waits until another log-in at this server is allowed, and counts it while it lasts.
        Raises LaunchError at the deadline."""
        with self._lock:
            gate = self._gates.setdefault(where, threading.Semaphore(LOGINS))
        while not gate.acquire(timeout=left(deadline, float("inf"))):
            pass
        try:
            yield
        finally:
            gate.release()
