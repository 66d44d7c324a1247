"""What has to hold for the data that ranks read: no sample is read twice in a step, and none is left out needlessly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dadt.config.check import NEVER, snapshot_interval
from dadt.control import snapshot_parts
from dadt.errors import NotResumed
from simulation.world import Broken

if TYPE_CHECKING:
    from simulation.disk import Content, Disk
    from simulation.job import SimulatedJob
    from simulation.run import SimulatedRun
    from simulation.worker import Worker
    from simulation.worker_training import StepTold


def check_shares(told: Sequence[StepTold], generation: int, *, redistribute: bool) -> None:
    """Check one step of all ranks. generation: the one in which they take it."""
    began = [each for each in told if each.pass_begun >= 0]
    if any(each.share.whole != told[0].share.whole for each in told):
        raise Broken(f"ranks divide different data: {told}")
    if any(each.readers != began[0].readers for each in began):
        raise Broken(f"ranks do not divide the data in the same way: {told}")
    taken = [sample for each in told if each.share.samples for sample in each.share.index]
    if len(taken) != len({*taken}):
        raise Broken(f"two ranks read the same samples: {told}")
    present, readers = {each.rank for each in told}, {*(began[0].readers if began else ())}
    if redistribute and all(each.pass_begun == generation for each in told) and present != readers:
        raise Broken(f"a pass was begun by ranks {present}, and is divided among {readers}")
    if began and {each.rank for each in began} >= readers and len(taken) < len(told[0].share.whole):
        raise Broken(f"samples are left out though all are there who read: {told}")


class SnapshotInvariants:
    """A snapshot that is named exists whole, all ranks resume from it at the same point, and a job that goes on from it
    has its step and weights."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self._newest: dict[int, int] = {}
        """For each disk the newest complete snapshot that has been there."""
        self._weights: dict[tuple[int, int], int] = {}
        """For each attempt and step the weights of the first optimizer that all ranks had before it."""
        self._resumed: tuple[int, int] | None = None
        """Step and weights with which the newest attempt has to go on; None once it has."""
        self._base = 0
        """The step that it goes on from."""
        self._checked: dict[tuple[int, int], list[object]] = {}
        """For each disk and complete snapshot what was looked at, so that the same is looked at once."""

    def begins(self, job: SimulatedJob) -> None:
        """The snapshot is chosen from which an attempt goes on."""
        run, disk = self._run, job.disk_of(0)
        named = int(Path(job.config.resume).name) if job.config.resume else 0
        if named and named not in disk.whole:
            raise Broken(f"the job goes on from step {named}, and complete snapshots are {disk.whole}")
        newest = self._newest.get(id(disk), 0) if job.number and not run.restarts.refused else 0
        if named != newest:
            raise Broken(f"the job goes on from step {named}, and the newest complete snapshot is {newest}")
        if any(step > named for step in disk.snapshots):
            raise Broken(f"snapshots are left that are newer than that of step {named}: {list(disk.snapshots)}")
        self._newest = {id(each): max([0, *each.whole]) for each in run.disks.values()}

    def placed(self, job: SimulatedJob) -> None:
        """It is known how many ranks go on."""
        named = int(Path(job.config.resume).name) if job.config.resume else 0
        self._base, self._resumed = named, (0, 1)
        if named:
            parts = job.disk_of(0).snapshots[named]
            source = snapshot_parts.source(job.disk_of(0).parts(named), 0, job.size)
            content = parts[source.common].content
            assert content is not None
            self._resumed = named, content.weights[0]
        self._newest = {
            id(each): max([0, *(step for step in each.whole if self._stays(each, step))])
            for each in self._run.disks.values()
        }

    def _stays(self, disk: Disk, step: int) -> bool:
        """Whether the newest attempt does not take a snapshot of this step once more, beside one that is left of an
        attempt before on a disk that the launcher does not see."""
        attempts = {each.content.attempt for each in disk.snapshots[step].values() if each.content is not None}
        return step <= self._base or max(each.number for each in self._run.attempts) in attempts

    def read(self, worker: Worker) -> Content:
        """A rank reads the snapshot from which the job goes on. Raises NotResumed where it may."""
        job = worker.agent.job
        try:
            return worker.snapshots.read()
        except NotResumed as error:
            if job.disk_of(worker.host) is job.disk_of(0):
                raise Broken(f"rank {worker.rank} cannot go on from a complete snapshot: {error}") from error
            job.invariants.raises(worker.rank, error)
            raise

    def trained(self, operation: str, told: StepTold) -> None:
        """All ranks have taken a step."""
        _, step, _, number = operation.split()
        if number == "0":
            self._weights[self._run.attempt.number, int(step)] = told.weights
        if self._resumed is not None:
            if self._resumed != (int(step), told.weights):
                raise Broken(f"training goes on at step {step} with {told.weights}, in place of {self._resumed}")
            self._resumed = None

    def seen(self, disk: Disk) -> None:
        """A part has become complete."""
        attempts = range(len(self._run.attempts))
        for step in disk.whole:
            files = [(rank, each.content, each.told) for rank, each in disk.snapshots[step].items()]
            looked_at = [self._run.attempt.size, files, [self._weights.get((number, step)) for number in attempts]]
            if self._checked.get((id(disk), step)) != looked_at:
                self._check(disk, step)
                self._checked[id(disk), step] = looked_at
            if self._stays(disk, step):
                self._newest[id(disk)] = max(step, self._newest.get(id(disk), 0))

    def ended(self) -> None:
        """Nothing is left to happen."""
        job = self._run.attempt
        for disk in self._run.disks.values():
            if (newest := self._newest.get(id(disk), 0)) and newest not in disk.whole:
                raise Broken(f"the snapshot of step {newest} was complete, and {disk.whole} are")
        every = snapshot_interval(job.config.snapshot_every)[0] if job.config.snapshot_every != NEVER else 0
        whole = not job.invariants.struck
        if every and whole and job.workers and (job.hosts == 1 or job.scenario.shares_disk):
            trained = min(worker.step for worker in job.workers) - 1 - self._base
            taken = self._base + trained // every * every
            if taken > 0 and job.disk_of(0).whole[-1:] != [taken]:
                raise Broken(f"the newest complete snapshots are {job.disk_of(0).whole}, and not that of step {taken}")

    def _check(self, disk: Disk, step: int) -> None:
        size, files, parts = self._run.attempt.size, disk.snapshots[step], disk.parts(step)
        sources = [snapshot_parts.source(parts, rank, size) for rank in range(size)]
        read = {each for source in sources for each in (source.common, source.own) if each is not None}
        contents = [content for rank in read if (content := files[rank].content) is not None]
        if len({(each.step, each.weights, each.generation, each.attempt) for each in contents}) > 1:
            raise Broken(f"ranks would resume from what they have not trained together: {contents}")
        if not all(parts[source.common]["common"] for source in sources):
            raise Broken(f"nobody has written what ranks have in common after step {step}")
        if len({source.is_exact for source in sources}) > 1:
            raise Broken(f"some ranks would resume exactly where they were, and others not: {sources}")
        weights = self._weights.get((contents[0].attempt, step))
        if weights is not None and contents[0].weights[0] != weights:
            raise Broken(f"the snapshot of step {step} has other weights than were trained")
