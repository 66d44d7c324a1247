"""How a new worker joins those that step together: it asks how far they are, replays its script, and is given their
state while they wait for it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from dadt.errors import PeerLost
from dadt.inject.replay.handover import TRIES
from dadt.inject.replay.newcomer import NEAR_SECONDS, ROUNDS
from dadt.train.approaches import Approach
from simulation.data import Work
from simulation.worker_thread import Steps

if TYPE_CHECKING:
    from simulation.worker import Worker

TAKE_SECONDS = 0.02
"""What it takes to copy the state that a new worker is given."""
LOAD_SECONDS = 0.1
"""What the script does until its next forward."""
REPLAYED = 0.1
"""What a step takes in a replay, as a part of what it takes otherwise."""


class WorkerHandover:
    """The part of a rank that trains (dadt/inject/replay/handover.py)."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._peers = worker, worker.peers
        self._ready: list[tuple[Approach, int]] = []
        """New workers for which the state is collected, with the number of gatherings until then."""
        self._again: list[Approach] = []
        self._tries: Counter[int] = Counter()

    @property
    def _gives(self) -> bool:
        return self._worker.rank == self._peers.members[0]

    def stepped(self) -> Steps:
        """A step is complete: serve the new workers that ask to join."""
        again = [*self._again, *(approach for approach, _ in self._ready)]
        self._again, self._ready = [], []
        for approach in [*again, *self._worker.approaches.due(self._worker.step)]:
            yield from self._heed(approach)

    def saw(self) -> Steps:
        """The next step begins: hand over what is collected."""
        if self._ready:
            yield self._worker.sleep(self._worker.world.spread(LOAD_SECONDS))
        ready, self._ready = self._ready, []
        if ready and self._worker.training.gatherings.count == ready[0][1]:
            yield from self._hand_over(ready[0][0])
        else:
            self._again += [approach for approach, _ in ready]

    def regrouped(self) -> None:
        self._again, self._ready = [], []

    def _heed(self, approach: Approach) -> Steps:
        self._tries[approach.number] += 1
        if not approach.last:
            if self._gives:
                yield from self._give(approach, self._told())
        elif self._tries[approach.number] > TRIES:
            if self._gives:
                yield from self._give(approach, {}, "the script does too much before each step")
        else:
            self._worker.snapshots.drop()
            yield self._worker.sleep(TAKE_SECONDS)
            self._ready.append((approach, self._worker.training.gatherings.count))

    def _told(self) -> dict[str, Any]:
        worker = self._worker
        return {"step": worker.step, "giver": worker.rank, "plan": worker.snapshots.plan}

    def _give(self, approach: Approach, told: dict[str, Any], why: str = "") -> Steps:
        facts = {"number": approach.number, "last": approach.last, "more": False, "text": why}
        body = json.dumps(told).encode() if told else b""
        yield from self._worker.ask("give", 0.0, body, generation=self._peers.generation, **facts)

    def _hand_over(self, approach: Approach) -> Steps:
        worker, gives = self._worker, self._gives
        worker.agent.job.comes_to("handing over", worker.rank)
        yield from self._give(approach, self._told() if gives else {})
        state, equal = (worker.step, tuple(worker.training.weights)), approach.rank + self._peers.place
        lost = PeerLost(f"rank {equal} does not come")
        yield from self._peers.connect_anew(lost, worker.config.timeout)
        if gives and equal in self._peers.members and self._peers.connection is not None:
            self._peers.connection.send(equal, state)
        yield from worker.training.join()


class Newcomer:
    """The part of a new worker (dadt/inject/replay/newcomer.py)."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._peers = worker, worker.peers
        self._giver = -1
        self._plan: list[int] = []

    def replay(self) -> Steps:
        """Run the script up to the step of the others, until they wait."""
        worker = self._worker
        rounds, asked, step, last = 0, 0.0, 0, False
        while not last:
            last = rounds == ROUNDS or (rounds > 0 and worker.world.now - asked < NEAR_SECONDS)
            worker.agent.job.comes_to("a new worker asks", worker.rank)
            seconds = max(worker.config.timeout, worker.config.start_timeout)
            answer = yield from worker.ask("approach", seconds, known=0, last=last)
            told = json.loads(answer.body)
            self._giver, self._plan = told["giver"], told["plan"]
            rounds, asked = rounds + 1, worker.world.now
            if not last:
                yield worker.sleep((told["step"] - step) * worker.script.step_seconds * REPLAYED)
                step = told["step"]
        worker.agent.job.comes_to("a new worker claims its rank", worker.rank)

    def take_state(self) -> Steps:
        """Receive the state from the rank that gives it."""
        worker, peers = self._worker, self._peers
        if self._giver not in peers.members:
            raise PeerLost(f"rank {self._giver} was lost before it had given its state to this one")
        worker.agent.job.comes_to("a new worker takes the state", worker.rank)
        work = Work()
        assert peers.connection is not None
        peers.connection.receive(worker.rank, work.end)
        step, weights = yield from peers.wait(work, "giving the state")
        worker.snapshots.follow(self._plan)
        worker.training.take_place_at(step, weights)
