"""Forwards the output of a host's workers to the launcher."""

from __future__ import annotations

from collections.abc import Iterable

from dadt.control.frame import Frame
from dadt.launch.agent.launcher_line import LauncherLine
from dadt.launch.agent.worker import Worker


class WorkerOutput:
    """Forwards the workers' output. While the launcher reads too slowly, the workers' pipes are not read, so workers
    that print block."""

    def __init__(self, launcher: LauncherLine) -> None:
        self._launcher = launcher
        self._paused = False

    def watch(self, worker: Worker) -> None:
        """Forward what this worker prints from now on."""
        for stream in worker.pipes:
            self._watch(worker, stream)

    def drain(self, worker: Worker) -> None:
        """Forward everything that this worker has printed so far."""
        for stream in worker.pipes:
            while self._read(worker, stream):
                pass

    def balance(self, workers: Iterable[Worker]) -> None:
        """Stop reading these workers' output while the launcher reads too slowly, and continue when it has caught
        up."""
        full = self._launcher.full
        if full == self._paused:
            return
        self._paused = full
        for worker in workers:
            for stream, pipe in worker.pipes.items():
                if pipe.closed:
                    continue
                if full:
                    self._launcher.forget(pipe.fileno())
                else:
                    self._watch(worker, stream)

    def _watch(self, worker: Worker, stream: str) -> None:
        self._launcher.watch(worker.pipes[stream].fileno(), lambda: self._read(worker, stream))

    def _read(self, worker: Worker, stream: str) -> bool:
        """Forward the output of one stream that is available now. Returns whether there may be more."""
        pipe = worker.pipes[stream]
        if pipe.closed:
            return False
        data = worker.read(stream)
        if data:
            self._launcher.send(Frame(stream, {"rank": worker.rank}, data))
        elif data is None:
            self._launcher.forget(pipe.fileno())
            pipe.close()
        return bool(data)
