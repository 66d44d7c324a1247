"""A new worker's script is made again up to where this rank's is, and then trains with it.

The new worker asks twice or more. Each time it is told, after a step, what the others' scripts have read from tensors
so far, with which it comes closer while they go on training. The last time they wait: it is given their state, and all
connect anew with it, as in a job that goes on from a snapshot.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from dadt.comm import plain
from dadt.control.worker_line import WorkerLine
from dadt.errors import CommError, DadtError, PeerLost
from dadt.inject.replay.recorder import Recorder, goes_on
from dadt.inject.replay.taken import Taken
from dadt.inject.replay.values import ReadValues
from dadt.train.approaches import Approach
from dadt.train.runtime import Runtime

PIECE = 16 << 20
"""Most bytes of values in one answer."""
TRIES = 5
"""Most steps in a row at which a new worker may fail to join before it is refused."""
TAG = 91
"""The tag of the message that brings a new worker the state."""


class Ready(NamedTuple):
    """What a new worker gets if the next forward goes on with nothing older."""

    approach: Approach
    values: bytearray
    """The recorded values that the script had read by then."""
    state: bytes
    """The encoded state, on the rank that gives it; empty on the others."""
    parts: dict[torch.optim.Optimizer, dict[str, Any]]
    """This rank's part of each optimizer's state, from which it goes on, too."""
    begun: tuple[int, int]
    """Numbers of backwards and gatherings so far. The new worker would repeat any that came later."""


class Handover:
    """What a rank that trains already does to let a new worker join."""

    def __init__(self, runtime: Runtime, values: ReadValues, recorder: Recorder, taken: Taken) -> None:
        self._runtime, self._values, self._recorder, self._taken = runtime, values, recorder, taken
        self._ranks = runtime.ranks
        self._ready: list[Ready] = []
        self._again: list[Approach] = []
        """New workers that could not join at the last step, and are tried at the next."""
        self._tries: Counter[int] = Counter()

    def stepped(self) -> None:
        """A step is complete, here and on all others."""
        again = [*self._again, *(each.approach for each in self._ready)]
        self._again, self._ready = [], []
        for approach in [*again, *self._ranks.requests.approaches.due()]:
            with self._values.aside():
                self._heed(approach)

    def saw(self, given: Any) -> None:
        """A training forward begins, with these arguments: hands over what is ready, if the forward does not rely on
        older computations."""
        ready, self._ready = self._ready, []
        if ready and not goes_on(given) and self._begun == ready[0].begun:
            with self._values.aside():
                self._hand_over(ready[0])  # after which the others are told anew
        else:
            self._again += [each.approach for each in ready]

    def regrouped(self) -> None:
        """All ranks have connected again, some perhaps before they knew of what is ready here. Open approaches are
        reported again, so forget them."""
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
        """Collect what the new worker is to get; None if that cannot be encoded, and the worker was refused."""
        r = self._runtime
        self._recorder.drop()
        content = self._taken.take(sys._getframe(), common=self._gives)
        with r.checkpoints.by_all():
            parts = {o: part for o in r.optimizers if (part := r.checkpoints.save(o)) is not None}
        try:
            state = plain.encode(content, "what a new worker is given") if self._gives else b""
        except DadtError as error:  # such as a scheduler's that is no plain value
            self._refuse(approach, str(error))
            return None
        return Ready(approach, bytearray(self._values.recorded), state, parts, self._begun)

    @property
    def _begun(self) -> tuple[int, int]:
        return self._runtime.script.backwards, self._ranks.gatherings.count

    @property
    def _control(self) -> WorkerLine:
        control = self._ranks.control
        assert control is not None  # there is an agent, which has told of the approach
        return control

    def _refuse(self, approach: Approach, why: str) -> None:
        if self._gives:
            self._control.give(approach.number, b"", self._ranks.generation, last=approach.last, text=why)

    def _give(self, approach: Approach, values: bytearray, size: int = 0) -> None:
        """Tell the new worker how far this rank is. values: what its script had read by then. size: bytes of the state
        that follows."""
        ranks, end = self._ranks, approach.known + PIECE
        told = {"step": ranks.step, "values": bytes(values[approach.known : end]), "more": end < len(values)}
        told |= {"plan": self._recorder.plan, "giver": ranks.world.rank, "shares": ranks.shares, "size": size}
        blob = plain.encode(told, "what a new worker is told")
        self._control.give(approach.number, blob, ranks.generation, last=approach.last)

    def _hand_over(self, ready: Ready) -> None:
        """Let all ranks connect again, with the new worker unless it has ended, and give it the state."""
        ranks, approach, gives = self._ranks, ready.approach, self._gives
        if gives:
            self._give(approach, ready.values, len(ready.state))
        else:
            self._control.give(approach.number, b"", ranks.generation, last=True)
        lost = PeerLost(f"rank {approach.rank} does not come")
        self._runtime.recovery.connect_anew(lost, ranks.config.timeout, ready.parts)
        if gives and approach.rank in ranks.members:
            state = torch.frombuffer(bytearray(ready.state), dtype=torch.uint8)
            with suppress(CommError):  # of which the next step knows, too
                message = ranks.mail.send(state, list(ranks.members).index(approach.rank), TAG)
                ranks.await_message(message, f"giving the state to rank {approach.rank}")
        self._runtime.begin()
