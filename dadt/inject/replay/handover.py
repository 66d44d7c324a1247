"""Lets a new worker join a running job: its script is replayed up to the current step of the other ranks, and then
trains with them.

The new worker sends two or more requests. After a step, it receives the values that the scripts of the other ranks have
read from tensors so far, and replays up to that step while these ranks continue to train. At its last request the other
ranks wait. They send the new worker their state, and all ranks, including the new one, connect again, as in a job that
resumes from a snapshot.

The new workers of an island send each request together, so that all of them replay up to the same step, and join
together. Each gets values and state from a rank that holds the same part of the model.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from dadt.algorithms.local.local import Local
from dadt.comm import plain
from dadt.control.worker_line import WorkerLine
from dadt.errors import CommError, DadtError, PeerLost, StartTimeout
from dadt.inject.replay.recorder import Recorder, goes_on
from dadt.inject.replay.taken import Taken
from dadt.inject.replay.values import ReadValues
from dadt.train.approaches import Approach
from dadt.train.digest import as_bytes, digests
from dadt.train.runtime import Runtime

PIECE = 16 << 20
"""Maximum number of bytes of recorded values in one message to a new worker."""
TRIES = 5
"""Maximum number of consecutive steps at which a new worker may fail to join before it is refused."""
TAG = 91
"""Tag of the point-to-point messages with which a new worker receives the state."""
Description = list[int | str]
"""A frozen tensor's digest, dtype and sizes."""


class Ready(NamedTuple):
    """The data that a new worker gets. It is sent only if the next training forward does not depend on earlier
    computations."""

    approach: Approach
    values: bytearray
    """The values that the script had read from tensors, as recorded up to the step of this state."""
    state: bytes
    """The encoded state, on the rank that sends it; empty on the others."""
    parts: dict[torch.optim.Optimizer, dict[str, Any]]
    """This rank's own part of each optimizer's state, with which this rank itself continues after all ranks have
    connected again."""
    frozen: list[tuple[torch.Tensor, int]]
    """Frozen tensors that `state` only describes, each with its digest. The new worker requests those that it lacks.
    They are the script's own tensors, not copies."""
    begun: tuple[int, int]
    """Numbers of backwards and all-gathers of this rank when the state was collected. If either has grown since then,
    the new worker would repeat some of them, so it cannot join at this step."""


class Handover:
    """Lets new workers join the job, on a rank that already trains."""

    def __init__(self, runtime: Runtime, values: ReadValues, recorder: Recorder, taken: Taken) -> None:
        self._runtime, self._values, self._recorder, self._taken = runtime, values, recorder, taken
        self._ranks = runtime.ranks
        self._ready: list[Ready] = []
        self._again: list[Approach] = []
        """New workers that could not join at the last step, to be tried again at the next one."""
        self._tries: Counter[int] = Counter()
        self._place = runtime.ranks.world.rank % runtime.ranks.world.parts
        """Place of this rank in its island, which is that of the new worker that it serves."""

    def stepped(self) -> None:
        """Called when a step is complete on all ranks: answer the requests of new workers that want to join."""
        again = [*self._again, *(each.approach for each in self._ready)]
        self._again, self._ready = [], []
        generation = self._ranks.generation
        for approach in [*again, *self._ranks.requests.approaches.due(self._ranks.step)]:
            if self._ranks.generation == generation:  # else agents report the new workers again
                with self._values.aside():
                    self._heed(approach)

    def saw(self, given: Any) -> None:
        """Called when a training forward begins, with its arguments: send the prepared state to the new worker, unless
        the forward depends on earlier computations."""
        ready, self._ready = self._ready, []
        if ready and not goes_on(given) and self._begun == ready[0].begun:
            with self._values.aside():
                self._hand_over(ready[0])  # afterwards the agents report all other new workers again
        else:
            self._again += [each.approach for each in ready]

    def regrouped(self) -> None:
        """Called when all ranks have connected again, some of which may have no prepared states. Forget the prepared
        states, since agents report the waiting new workers again."""
        self._again, self._ready = [], []

    def _heed(self, approach: Approach) -> None:
        self._tries[approach.number] += 1
        if self._recorder.stopped:
            self._refuse(approach, "no snapshots are taken of it")
        elif not approach.last:
            if self._gives:
                self._give(approach, self._values.recorded)
        elif self._tries[approach.number] > TRIES:
            self._refuse(approach, "the script does, before each step, what a new worker cannot have done with it")
        else:
            generation, ready = self._ranks.generation, self._take(approach)
            if ready is not None and self._ranks.generation == generation:
                self._ready.append(ready)

    @property
    def _gives(self) -> bool:
        return self._ranks.world.rank == self._ranks.members[0]

    def _take(self, approach: Approach) -> Ready | None:
        """Collect the data for the new worker. Returns None if ranks are lost meanwhile, or if the state cannot be
        encoded, in which case the new worker is refused."""
        r = self._runtime
        self._recorder.drop()
        if not self._settle(approach):
            return None
        content = self._taken.take(sys._getframe(), common=self._gives)
        with r.checkpoints.by_all():
            parts = {o: part for o in r.optimizers if (part := r.checkpoints.save(o)) is not None}
        frozen = content.pop("frozen", {})
        content["frozen"] = {name: description_of(tensor, digest) for name, (tensor, digest) in frozen.items()}
        try:
            state = plain.encode(content, "what a new worker is given") if self._gives else b""
        # Raised if the state contains objects that are no plain values, such as a custom scheduler's
        except DadtError as error:
            self._refuse(approach, str(error))
            return None
        return Ready(approach, bytearray(self._values.recorded), state, parts, [*frozen.values()], self._begun)

    def _settle(self, approach: Approach) -> bool:
        """Give all ranks the same weights, if each has its own. Returns whether all ranks have; otherwise ranks are
        lost, and some may have forgotten the new worker."""
        gc.collect()  # garbage may be freed already on some ranks and not yet on others
        algorithms = [a.algorithm for a in self._runtime.attachments if a.alive]
        ranks, apart = self._ranks, [each for each in algorithms if isinstance(each, Local) and not each.averages]
        if apart:
            key = f"averaging for new worker {approach.number} at step {ranks.step}"
            try:
                self._control.exchange(key, b"", ranks.config.timeout, ranks.generation)
            except (PeerLost, StartTimeout):  # also on all others
                return False
        for algorithm in apart:
            algorithm.settle()
        return True

    @property
    def _begun(self) -> tuple[int, int]:
        return self._runtime.script.backwards, self._ranks.gatherings.count

    @property
    def _control(self) -> WorkerLine:
        control = self._ranks.control
        assert control is not None  # an agent exists, since it has reported the new worker
        return control

    def _refuse(self, approach: Approach, why: str) -> None:
        if self._gives:
            self._control.give(approach.number, b"", self._ranks.generation, last=approach.last, text=why)

    def _give(self, approach: Approach, values: bytearray, size: int = 0) -> None:
        """Send the new worker the number of the current step and recorded values. values: all that the script had read
        from tensors up to this step. size: number of bytes of the state that is sent next, 0 if none."""
        ranks, known = self._ranks, approach.known[self._place]
        told = {"step": ranks.step, "values": bytes(values[known : known + PIECE]), "last": approach.last}
        told |= {"plan": self._recorder.plan, "giver": ranks.world.rank, "shares": ranks.shares, "size": size}
        blob, more = plain.encode(told, "what a new worker is told"), known + PIECE < len(values)
        self._control.give(approach.number, blob, ranks.generation, last=approach.last, more=more)

    def _hand_over(self, ready: Ready) -> None:
        """Connect all ranks again, including the new worker unless it has ended, and send it the state."""
        ranks, approach, gives = self._ranks, ready.approach, self._gives
        equal = approach.rank + self._place
        if gives:
            self._give(approach, ready.values, len(ready.state))
        else:
            self._control.give(approach.number, b"", ranks.generation, last=True)
        lost = PeerLost(f"rank {equal} does not come")
        self._runtime.recovery.connect_anew(lost, ranks.config.timeout, ready.parts)
        if gives and equal in ranks.members:
            with suppress(CommError):  # the next step of training notices a lost rank, too
                self._send(ready, equal)
        self._runtime.begin()

    def _send(self, ready: Ready, rank: int) -> None:
        """Send the state, and the frozen tensors that it requests, to the new worker of this rank."""
        what = f"giving the state to rank {rank}"
        mail, wait, place = self._ranks.mail, self._ranks.await_message, list(self._ranks.members).index(rank)
        wait(mail.send(torch.frombuffer(bytearray(ready.state), dtype=torch.uint8), place, TAG), what)
        lacks = torch.zeros(len(ready.frozen), dtype=torch.uint8, device="cpu")
        if ready.frozen:
            wait(mail.receive(lacks, place, TAG), what)
        for (tensor, digest), lack in zip(ready.frozen, lacks.tolist(), strict=True):
            if lack:
                values = tensor.detach().to("cpu")
                is_same = digests([values]) == [digest]  # the script may have changed the tensor
                wait(mail.send(torch.tensor([is_same], dtype=torch.uint8, device="cpu"), place, TAG), what)
                if not is_same:
                    return
                wait(mail.send(as_bytes(values), place, TAG), what)


def description_of(tensor: torch.Tensor, digest: int) -> Description:
    return [digest, str(tensor.dtype), *tensor.shape]
