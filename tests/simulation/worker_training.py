"""What a simulated worker trains: its optimizers, its passes over the data, and what ranks gather beside that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dadt.errors import CommError, PeerLost
from dadt.inject.data import division
from dadt.inject.data.share import PerRank, StepShare
from dadt.train.loss import position
from dadt.train.loss.gathering import Gathering, Gatherings
from dadt.train.loss.position import Position
from simulation.data import Work, mixed
from simulation.worker_script import BATCH_SIZE, Interrupted
from simulation.worker_thread import Steps

if TYPE_CHECKING:
    from simulation.worker import Worker


class StepTold(NamedTuple):
    """What a rank tells all others in a step."""

    rank: int
    weights: int
    saves: int
    interrupts: int
    share: StepShare
    readers: Sequence[int]
    """The ranks that were agreed on, among which the data are divided."""
    pass_begun: int
    """The generation in which the rank has begun its pass over the data; -1 if it has joined in the midst of it."""
    approach: int
    """The newest request to join of which the rank knows."""


class Training:
    """One rank's training. Where ranks step together it takes part in what all of them do, as dadt/train does."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._peers, self._script = worker, worker.peers, worker.script
        self.averages = [-1] * worker.script.optimizers
        """For each optimizer the number of steps that are averaged; -1 before it has the first rank's state."""
        self.weights = [1] * worker.script.optimizers
        self.begun = False
        """Whether it has been joined with the others, and has trained or is about to."""
        self._attached = False
        """Whether optimizers are attached: they are not before, nor while a new worker is let in."""
        self.gatherings = Gatherings()
        self._works: dict[str, Work] = {}
        """The work of each gathering, by its name."""
        self._averaging: int | None = None
        self._readers: Sequence[int] = range(worker.agent.job.size)
        self._pass: list[StepShare] = []
        """What is left of the pass over the data."""
        self._pass_begun = 0

    # All ranks together ------------------------------------------------------------------------------------------

    def join(self) -> Steps:
        """Take the first rank's state of each optimizer (Lockstep.join)."""
        self._attached = True
        for number in range(len(self.averages)):
            while self.averages[number] < 0:
                with self._peers.within():
                    try:
                        told = yield from self._peers.call(f"joining {number}", self.weights[number])
                        self.averages[number], self.weights[number] = 0, told[0]
                    except CommError as error:
                        yield from self._peers.again(error)
        self.begun = True

    def release(self) -> None:
        """Optimizers are attached anew, as a new worker is let in (Recovery._release)."""
        self._attached = False
        self.averages = [-1] * len(self.averages)

    def take_place_at(self, step: int, weights: Sequence[int]) -> None:
        """Go on, as a new worker, from the step and the weights of the others."""
        shares = self._worker.snapshots.shares
        self._go_on_from(step, weights, division.spare(shares) if self._worker.config.redistribute else self._own)
        self._readers, self._pass_begun = (), -1

    def resume(self, step: int, weights: Sequence[int]) -> None:
        """Go on from a snapshot, as all ranks do; a replay divides the pass that it is in as the job began."""
        self._go_on_from(step, weights, self._own)

    def _go_on_from(self, step: int, weights: Sequence[int], divided: division.Division) -> None:
        self._worker.step, self.weights = step, list(weights)
        whole = list(PerRank(range(self._script.samples), BATCH_SIZE, False, *divided))
        self._pass = whole[step % len(whole) :] if step % len(whole) else []

    def step(self) -> Steps:
        """Average once, with all others where they step together."""
        worker, peers = self._worker, self._peers
        if not peers.together:
            peers.check()
            self.averages[-1] += 1
            worker.step = self.averages[-1]
            worker.agent.job.invariants.trains(worker)
            yield from worker.know_step()
            return
        worker.snapshots.begins()
        if peers.deaths.outdated:
            yield from peers.connect_anew(PeerLost("ranks have ended"))
        peers.deaths.check()
        share = self._pass.pop(0)
        for number in range(len(self.averages)):
            yield from self._average(number, share)
        worker.step = max(0, worker.step) + 1
        yield from worker.know_step()
        due = worker.peers.interrupts_agreed and worker.step >= worker.interrupts_due
        if due and not worker.interrupted:
            worker.interrupted = True
            if self._script.on_interrupt != "ignore":
                raise Interrupted
        peers.deaths.stepped(worker.step)

    def _average(self, number: int, share: StepShare) -> Steps:
        """Lockstep.average."""
        worker, before = self._worker, self.averages[number]
        step, self._averaging = max(0, worker.step), number
        while self.averages[number] == before:
            try:
                heard = worker.saves_heard, worker.interrupts_heard, worker.approaches.heard
                saves, interrupts, approach = (0, 0, 0) if worker.island.is_apart else heard
                told = StepTold(
                    worker.rank, self.weights[number], saves, interrupts, share,
                    self._readers, self._pass_begun, approach,
                )  # fmt: skip
                every: Sequence[StepTold] = yield from self._peers.call(f"step {step} of {number}", told)
                self.weights[number] = mixed(self.weights[number], step, [each.rank for each in every])
                self.averages[number] += 1
                worker.approaches.agree(each.approach for each in every)
                worker.saves_agreed = max(worker.saves_agreed, *(each.saves for each in every))
                worker.peers.interrupts_agreed |= any(each.interrupts for each in every)
            except CommError as error:
                yield from self._peers.connect_anew(error)
        self._averaging = None

    # Data --------------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> division.Division:
        """Each rank reads its own share (division.begun)."""
        size = self._worker.agent.job.size
        return division.Division(self._worker.rank, size, self._worker.snapshots.shares)

    def begin_pass(self) -> Steps:
        """Divide the next pass over the data, if one begins (dadt/inject/data/division.py, agree)."""
        worker = self._worker
        if self._pass or not self._peers.together:
            return
        size, self._pass_begun = worker.agent.job.size, self._peers.generation
        if worker.config.redistribute and size > 1:
            lanes = yield from self.gather("who reads", str(worker.rank).encode())
            self._readers = [int(lane) for lane in lanes]
            divided = division.among(self._readers, worker.rank, worker.snapshots.shares)
        else:
            self._readers, divided = range(size), self._own
        self._pass = list(PerRank(range(self._script.samples), BATCH_SIZE, False, *divided))

    def evaluate(self) -> Steps:
        """Gather a measure from all ranks, as scripts do from time to time."""
        every = self._script.evaluate_every
        if every and self._peers.together and self._worker.step % every == 0:
            yield from self.gather("evaluation", b"1.0")

    # What is gathered --------------------------------------------------------------------------------------------

    def allgather(self, data: bytes, name: str) -> Work:
        """Launch a gathering, as the engine does."""
        work = self._works[name] = self._peers.begin_operation(name, data, int(name.rpartition(" ")[2]))
        return work

    def gather(self, name: str, data: bytes) -> Steps:
        """Gather bytes from all ranks (Ranks.allgather and Ranks.wait)."""
        gathering = self.gatherings.begin(
            f"{name} {self.gatherings.count}", data, self._worker.world.now, lambda lanes: None,
            kept=self._peers.survives,
        )  # fmt: skip
        self._launch(gathering)
        while not gathering.complete:
            try:
                yield from self._peers.wait(self._works[gathering.name], gathering.name)
            except CommError as error:
                yield from self._peers.again(error)
        return gathering.lanes

    def _launch(self, gathering: Gathering) -> None:
        gathering.launch(self)  # type: ignore[arg-type]

    # After a loss --------------------------------------------------------------------------------------------------

    def _position(self) -> Position:
        count, joins = len(self.averages), self._peers.is_new and not self._attached
        return Position(
            averaged=list(self.averages) if self._attached else [], consumed=[False] * count, rounds=[{}] * count,
            gathered=self.gatherings.completed, repeatable=True, stuck="", joins=joins,
        )  # fmt: skip

    def regroup(self) -> Steps:
        """Go on with the ranks that are connected now (dadt/train/loss/regroup.py)."""
        worker, peers = self._worker, self._peers
        told: Sequence[Position] = yield from peers.call("position", self._position())
        if not peers.together:
            if self.averages[-1] < 0 and (most := max([*each.averaged, -1][0] for each in told)) >= 0:
                worker.step = self.averages[-1] = most
            return
        course = position.decide(told, peers.members)
        if peers.is_new and not self._attached:
            self.gatherings.count = course.gathered
        me = peers.members.index(worker.rank)
        for number, root, behind in course.catch_ups:
            given = yield from peers.call(f"catching up {number}", self.weights[number])
            if me in behind:
                self.weights[number] = given[root]
        if course.least < course.gathered:
            known = self.gatherings.results(course.least) if me == course.informant else {}
            every = yield from peers.call("gathered", known)
            self.gatherings.settle(every[course.informant], course.gathered)
        for number, most in enumerate(course.furthest if self._attached else ()):
            if self.averages[number] < 0 or self._averaging == number:
                self.averages[number] = most
        if self._attached:
            worker.agent.job.invariants.agree(worker, course.furthest)
        for gathering in [each for each in self.gatherings.newest if not each.complete]:
            self._launch(gathering)
