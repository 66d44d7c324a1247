"""Lets a job answer other `dadt` commands of the same user while it waits for hosts and has no workers yet."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dadt.control.frame import Frame
from dadt.control.job_folder import Folder
from dadt.launch.monitor.host_links import HostLinks
from dadt.launch.monitor.watch import Gauge
from dadt.launch.query import Query


class Idle:
    """Answers other `dadt` commands while a job waits for hosts and has no agents or workers yet. Single-threaded."""

    gauges: Sequence[Gauge] = ()
    links = HostLinks(())

    def __init__(self, folder: Folder, facts: Mapping[str, Any], refused: Callable[[str], None]) -> None:
        """folder: the job's folder, in which the socket for other commands is. facts: facts about the job that do not
        change, as for `Query`. refused: called with the reason when a connection is rejected."""
        self.begin = time.time()
        self.state = "waiting for hosts"
        self.is_killed = False
        self._selector = selectors.DefaultSelector()
        self._query = Query(folder, self, self, facts, self._end, refused)

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None:
        self._query.close()
        self._selector.close()

    def watch(self, source: Any, read: Callable[[], Any]) -> None:
        self._selector.register(source, selectors.EVENT_READ, read)

    def forget(self, source: Any) -> None:
        self._selector.unregister(source)

    def send_all(self, frame: Frame) -> None:
        """Do nothing, as there is no agent to send to."""

    def wait(self, seconds: float) -> None:
        """Answer other commands for `seconds` seconds, or until one of them kills the job."""
        deadline = time.monotonic() + seconds
        while not self.is_killed and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(max(0.0, min(left, self._query.turn()))):
                key.data()

    def _end(self) -> float:
        self.is_killed = True
        return 0.0
