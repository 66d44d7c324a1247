"""Workers that mpirun starts: each comes to the agent as a shim, which asks what to run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dadt.control.frame import Frame
from dadt.launch.agent.worker import STREAMS, Worker


class ShimAdmission:
    """The agent's side. A worker's pipes are named ones, of which the shim opens the other end."""

    def __init__(self, folder: Path, answer: Callable[[int, Frame], None]) -> None:
        """answer: takes the number of a line, and the frame for whoever is there."""
        self._folder = folder
        self._answer = answer
        self._orders: dict[int, dict[str, Any]] = {}
        """What the ranks are to run that have not asked yet."""
        self._admitted: dict[int, Worker] = {}
        """Shims that were told what to run, by line."""
        self._deadline = float("inf")

    def expect(self, rank: int, order: Mapping[str, Any], timeout: float) -> None:
        """A shim will come for this rank."""
        self._orders[rank] = dict(order)
        self._deadline = time.monotonic() + timeout

    @property
    def pending(self) -> bool:
        """Some workers are not there yet."""
        return bool(self._orders) or any(not worker.pid for worker in self._admitted.values())

    def missing(self) -> str:
        """A sentence, once shims are overdue."""
        if not self._orders or time.monotonic() < self._deadline:
            return ""
        ranks = ", ".join(map(str, sorted(self._orders)))
        return f"mpirun did not start rank {ranks} here in time"

    def dismiss(self) -> None:
        """Whoever comes now gets nothing to run."""
        self._orders.clear()
        self._admitted = {line: worker for line, worker in self._admitted.items() if worker.pid}

    def admit(self, frame: Frame) -> None:
        """Tell a shim what to run."""
        order = self._orders.pop(frame["rank"], None)
        if order is None:
            return  # dismissed; the end of the line tells it
        paths = {stream: self._folder / f"{frame['rank']}.{stream}" for stream in STREAMS}
        descriptors = []
        for path in paths.values():
            os.mkfifo(path, 0o600)
            # Not read before the shim has opened it: until then it seems to have ended.
            descriptors.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        self._admitted[frame["line"]] = Worker(frame["rank"], 0, *descriptors)
        self._answer(frame["line"], Frame("order", {**order, **{stream: str(path) for stream, path in paths.items()}}))

    def spawned(self, frame: Frame) -> Worker | None:
        """The shim has started the worker."""
        worker = self._admitted.get(frame["line"])
        if worker is None or worker.pid:
            return None
        worker.pid = frame["pid"]
        return worker

    def admitted(self, line: int) -> bool:
        """Whether a shim is there that was told what to run."""
        return line in self._admitted

    def ended(self, frame: Frame) -> tuple[Worker, int] | None:
        """The shim says how the worker ended: it, and its peak memory."""
        worker = self._admitted.pop(frame["line"], None)
        if worker is None:
            return None
        worker.end(frame["status"])
        return worker, frame["peak_memory"]

    def hung_up(self, line: int) -> Worker | None:
        """Whoever was there is gone. Returns a worker whose shim was killed: it was killed with it."""
        worker = self._admitted.pop(line, None)
        if worker is not None:
            worker.end(signal.SIGKILL)
        return worker
