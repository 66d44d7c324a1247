"""Limits simultaneous log-ins at each server, as an sshd refuses connections while ten have not logged in yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dadt.launch.ssh.attempt import left

LOGINS = 6
"""Largest number of simultaneous log-ins at one server. It is smaller than the default MaxStartups allows, as other
users may log in as well, and an sshd counts a log-in for a little longer than its client does."""


class Gates:
    """The limits of simultaneous log-ins, one for each server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[str, threading.Semaphore] = {}

    @contextmanager
    def passed(self, where: str, deadline: float) -> Iterator[None]:
        """Wait until a log-in at this server is allowed. Raises LaunchError at the deadline."""
        with self._lock:
            gate = self._gates.setdefault(where, threading.Semaphore(LOGINS))
        while not gate.acquire(timeout=left(deadline, float("inf"))):
            pass
        try:
            yield
        finally:
            gate.release()
