"""What has to hold for the data that ranks read: no sample is read twice in a step, and none is left out needlessly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dadt.config.check import NEVER, snapshot_interval
from dadt.control import snapshot_parts
from simulation.world import Broken

if TYPE_CHECKING:
    from simulation.disk import Disk
    from simulation.job import SimulatedJob
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
    """A snapshot that is named exists whole, and all ranks resume from it at the same point."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._newest: dict[int, int] = {}
        """For each disk the newest complete snapshot that has been there."""
        self._weights: dict[int, int] = {}
        """For each step the weights of the first optimizer that all ranks had before it."""

    def trained(self, operation: str, told: StepTold) -> None:
        """All ranks have taken a step."""
        _, step, _, number = operation.split()
        if number == "0":
            self._weights[int(step)] = told.weights

    def seen(self, disk: Disk) -> None:
        """A part has become complete."""
        for step in disk.whole:
            self._check(disk, step)
            self._newest[id(disk)] = max(step, self._newest.get(id(disk), 0))

    def ended(self, *, whole: bool) -> None:
        """Nothing is left to happen. whole: whether nothing has gone wrong."""
        job = self._job
        for disk in job.disks.values():
            if (newest := self._newest.get(id(disk), 0)) and newest not in disk.whole:
                raise Broken(f"the snapshot of step {newest} was complete, and {disk.whole} are")
        every = snapshot_interval(job.config.snapshot_every)[0] if job.config.snapshot_every != NEVER else 0
        if every and whole and job.workers and (job.hosts == 1 or job.scenario.shares_disk):
            taken = (min(worker.step for worker in job.workers) - 1) // every * every
            if taken > 0 and job.disk_of(0).whole[-1:] != [taken]:
                raise Broken(f"the newest complete snapshots are {job.disk_of(0).whole}, and not that of step {taken}")

    def _check(self, disk: Disk, step: int) -> None:
        size, files, parts = self._job.size, disk.snapshots[step], disk.parts(step)
        sources = [snapshot_parts.source(parts, rank, size) for rank in range(size)]
        read = {each for source in sources for each in (source.common, source.own) if each is not None}
        contents = [content for rank in read if (content := files[rank].content) is not None]
        if len({(each.step, each.weights, each.generation) for each in contents}) > 1:
            raise Broken(f"ranks would resume from what they have not trained together: {contents}")
        if not all(parts[source.common]["common"] for source in sources):
            raise Broken(f"nobody has written what ranks have in common after step {step}")
        if len({source.is_exact for source in sources}) > 1:
            raise Broken(f"some ranks would resume exactly where they were, and others not: {sources}")
        if (weights := self._weights.get(step)) is not None and contents[0].weights[0] != weights:
            raise Broken(f"the snapshot of step {step} has other weights than were trained")
