"""Admission of shims: mpirun starts one per rank, and each asks the agent which worker to run."""

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
    """The agent's side. A worker's output comes through named pipes, whose other ends the shim opens."""

    def __init__(self, folder: Path, answer: Callable[[int, Frame], None]) -> None:
        """answer: sends a frame on the line with a number."""
        self._folder = folder
        self._answer = answer
        self._orders: dict[int, dict[str, Any]] = {}
        """Rank to the order for its shim, which has not come yet."""
        self._admitted: dict[int, Worker] = {}
        """Line to the worker of a shim that has its order."""
        self._deadline = float("inf")

    def expect(self, rank: int, order: Mapping[str, Any], timeout: float) -> None:
        """Expect a shim for this rank within `timeout` seconds."""
        self._orders[rank] = dict(order)
        self._deadline = time.monotonic() + timeout

    @property
    def pending(self) -> bool:
        """Whether some workers have not been started yet."""
        return bool(self._orders) or any(not worker.pid for worker in self._admitted.values())

    def missing(self) -> str:
        """A sentence that names the overdue shims; empty as long as none is."""
        if not self._orders or time.monotonic() < self._deadline:
            return ""
        ranks = ", ".join(map(str, sorted(self._orders)))
        return f"mpirun did not start rank {ranks} here in time"

    def dismiss(self) -> None:
        """Give no order to the shims that come from now on."""
        self._orders.clear()
        self._admitted = {line: worker for line, worker in self._admitted.items() if worker.pid}

    def admit(self, frame: Frame) -> None:
        """Send a shim its order."""
        order = self._orders.pop(frame["rank"], None)
        if order is None:
            return  # dismissed: the shim sees its line closed
        paths = {stream: self._folder / f"{frame['rank']}.{stream}" for stream in STREAMS}
        descriptors = []
        for path in paths.values():
            os.mkfifo(path, 0o600)
            # A pipe without a writer reads as ended, so it is not read before the shim has opened it.
            descriptors.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        self._admitted[frame["line"]] = Worker(frame["rank"], 0, *descriptors)
        self._answer(frame["line"], Frame("order", {**order, **{stream: str(path) for stream, path in paths.items()}}))

    def spawned(self, frame: Frame) -> Worker | None:
        """Handle a shim's report that it has started the worker. Returns the worker, if the report is expected."""
        worker = self._admitted.get(frame["line"])
        if worker is None or worker.pid:
            return None
        worker.pid = frame["pid"]
        return worker

    def admitted(self, line: int) -> bool:
        """Whether the shim on this line has its order."""
        return line in self._admitted

    def ended(self, frame: Frame) -> tuple[Worker, int] | None:
        """Handle a shim's report of how its worker ended. Returns the worker and its peak memory in bytes."""
        worker = self._admitted.pop(frame["line"], None)
        if worker is None:
            return None
        worker.end(frame["status"])
        return worker, frame["peak_memory"]

    def hung_up(self, line: int) -> Worker | None:
        """Handle the end of a line. Returns the worker of a shim that was killed: the worker died with it."""
        worker = self._admitted.pop(line, None)
        if worker is not None:
            worker.end(signal.SIGKILL)
        return worker
