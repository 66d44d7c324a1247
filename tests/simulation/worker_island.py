"""The script's own process group, which connects the ranks of an island: they wait for each other in collectives that
neither DADT nor the launcher sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dadt.errors import Mismatch
from simulation.data import Work
from simulation.worker_script import ScriptError
from simulation.worker_thread import Steps
from simulation.world import Broken

if TYPE_CHECKING:
    from simulation.worker import Worker

LOOK_SECONDS = 600.0
TIMEOUT_SECONDS = 1800.0
"""After so many seconds torch gives up by default."""
CLOSED = "gloo/transport/tcp/pair.cc: Connection closed by peer"
"""What torch says where another rank has ended."""


class WorkerIsland:
    """One rank's part in it. Without islands nothing happens."""

    def __init__(self, worker: Worker) -> None:
        job = worker.agent.job
        self._worker = worker
        self._connection = job.island_of(worker.rank) if job.island_size else None
        if self._connection is not None:
            self._connection.join(worker)

    @property
    def is_apart(self) -> bool:
        """Whether the exchange of a step does not connect the rank with all others."""
        return self._connection is not None

    def gather(self, name: str) -> Steps:
        """Wait for all ranks of the island. Raises ScriptError if one of them has ended."""
        if self._connection is None:
            return
        worker, work, begun = self._worker, Work(), self._worker.world.now
        self._connection.begin(worker.rank, name, None, work.end)
        while not work.done and worker.world.now - begun < TIMEOUT_SECONDS:
            yield worker.sleep(LOOK_SECONDS, work.waiting)
        if isinstance(work.error, Mismatch) and not worker.agent.job.invariants.ended_by_user:
            raise Broken(f"ranks of an island do not call the same collectives: {work.error}")
        if not work.done or work.error is not None:
            raise ScriptError("RuntimeError", CLOSED if work.done else "gloo: Timed out waiting")

    def settle(self) -> None:
        """The process goes on after a stop."""
        if self._connection is not None:
            self._connection.settle()

    def leave(self, *, silent: bool) -> None:
        """The process has ended."""
        if self._connection is not None:
            self._connection.leave(self._worker.rank, silent=silent)
