"""The snapshots that a simulated worker takes between two steps, and writes in the background."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dadt.config.check import NEVER, snapshot_interval
from dadt.control import snapshot_parts
from dadt.errors import NotResumed
from dadt.inject.replay.snapshot_timing import SnapshotTiming
from simulation.disk import Content
from simulation.worker_thread import Steps, Thread, Wait

if TYPE_CHECKING:
    from simulation.worker import Worker

WRITE_SECONDS = 0.3
"""What it takes to write the content of a part."""
RENAME_SECONDS = 0.001
SYNC_EVERY = 8


class WorkerSnapshots:
    """What dadt/inject/replay/recorder.py does: begins a snapshot after a step, completes it as the next step begins,
    and writes it beside the training."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._disk = worker, worker.agent.disk
        self.taken = worker.config.snapshot_every != NEVER
        self.shares = worker.agent.job.size
        """Among how many ranks the job's data was divided as it began."""
        self._timing = SnapshotTiming(snapshot_interval(worker.config.snapshot_every)[0] if self.taken else 0)
        self._open: tuple[Content, dict[str, Any]] | None = None
        self._written = 0
        """How many snapshots are being written, or wait for it."""
        self._last: Thread | None = None
        self._waiting: list[Wait] = []

    def stepped(self) -> None:
        """A step is complete: begin a snapshot if one is due."""
        worker = self._worker
        step = worker.step
        if step >= self._timing.next and self._timing.takes(step, SYNC_EVERY, possible=True, rests=True):
            peers, first, attempt = worker.peers, worker.peers.first, worker.agent.job.number
            told = {
                "members": list(peers.members), "attempt": attempt, "generation": peers.generation, "common": first,
                "next": f"{step}", "shares": self.shares, "world": worker.agent.job.size, "parts": 1,
                "seed": worker.config.seed, "step": step,
            }  # fmt: skip
            weights = tuple(worker.training.weights)
            self._open = Content(worker.rank, step, weights, peers.generation, attempt), told

    def read(self) -> Content:
        """The snapshot that the job goes on from, as this rank sees it (StoredSnapshot). Raises NotResumed."""
        worker, folder = self._worker, Path(self._worker.config.resume)
        step, size = int(folder.name), worker.agent.job.size
        if not (parts := self._disk.parts(step)):
            raise NotResumed(f"{folder}: has no whole part: resume from another one")
        source = snapshot_parts.source(parts, worker.rank, size)
        told = parts[source.common if source.own is None else source.own]
        self.shares = told["shares"]
        content = self._disk.files(step, source.common).content
        assert content is not None
        return content

    def goes_on_from(self, step: int) -> None:
        self._timing.goes_on_from(step)

    @property
    def plan(self) -> list[int]:
        """What decides after which steps snapshots are taken, for a new worker."""
        return [self._timing.next, self._timing.steps, self._timing.group]

    def follow(self, plan: list[int]) -> None:
        """Take snapshots after the same steps as the others, as a new worker."""
        self._timing.next, self._timing.steps, self._timing.group = plan

    def begins(self) -> None:
        """A step begins to use its gradients, before it communicates: the snapshot is complete."""
        self._timing.saw(self._worker.step)
        if self._open is not None:
            taken, self._open = self._open, None
            if self._worker.config.algorithm == "pipe" and self._worker.peers.connection_failed:
                return  # what is under way with the others cannot be completed
            self._written += 1
            self._last = Thread(self._worker, self._write(*taken, self._last), self._over)
            self._last.go_on()

    def drop(self) -> None:
        """Ranks have connected anew: the snapshot that is not complete is of no use."""
        self._open = None

    def close(self) -> Steps:
        """Wait until all are written."""
        self.drop()
        while self._written:
            yield self._worker.sleep(1.0, self._waiting)

    def _over(self, error: BaseException | None) -> None:
        self._written -= 1
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.give()

    def _write(self, content: Content, told: dict[str, Any], before: Thread | None) -> Steps:
        """What Recorder._write does."""
        worker, disk, step = self._worker, self._disk, content.step
        while before is not None and not before.over:
            yield worker.sleep(1.0, self._waiting)
        files = disk.files(step, content.rank)
        worker.agent.job.comes_to("writing a snapshot", worker.rank)
        yield worker.sleep(worker.world.spread(WRITE_SECONDS))
        if disk.full:
            disk.discard(step, content.rank)
            worker.report("say", text="no snapshot: No space left on device", level="warning")
            return
        if not disk.holds(step, content.rank, files):
            worker.report("say", text="no snapshot: No such file or directory", level="warning")
            return
        files.content = content
        worker.agent.job.comes_to("describing a snapshot", worker.rank)
        yield worker.sleep(RENAME_SECONDS)
        disk.describe(files, told)
        if told["common"]:
            disk.drop_old()
