"""A new worker's script is made again up to where this rank's is, and then trains with it.

The new worker asks twice or more. Each time it is told, after a step, what the others' scripts have read from tensors
so far, with which it comes closer while they go on training. The last time they wait: it is given their state, and all
connect anew with it, as in a job that goes on from a snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dadt.comm import plain
from dadt.control.agent_client import Control
from dadt.errors import CommError, PeerLost
from dadt.inject.replay.recorder import Recorder, goes_on
from dadt.inject.replay.taken import Taken
from dadt.inject.replay.values import Values
from dadt.train.approaches import Approach
from dadt.train.runtime import Runtime


class Ready(NamedTuple):
    """What a new worker gets if the next forward goes on with nothing older."""

    approach: Approach
    content: dict[str, Any]
    parts: dict[torch.optim.Optimizer, dict[str, Any]]
    """Of optimizers' states, from which this rank goes on, too."""
    begun: tuple[int, int]
    """Backwards and gatherings so far. The new worker would do once more what comes after."""


class Handover:
    """The side of a rank that trains already."""

    def __init__(self, runtime: Runtime, values: Values, recorder: Recorder, taken: Taken) -> None:
        self._runtime, self._values, self._recorder, self._taken = runtime, values, recorder, taken
        self._ready: list[Ready] = []
        self._again: list[Approach] = []
        """The step before was no place for the last one."""

    def stepped(self) -> None:
        """A step is complete, here and on all others."""
        r = self._runtime
        again = [*self._again, *(each.approach for each in self._ready)]
        self._again, self._ready = [], []
        for approach in [*again, *r.approaches.due()]:
            with self._values.aside():
                if approach.last:
                    generation, ready = r.generation, self._take(approach)
                    if r.generation == generation:
                        self._ready.append(ready)
                    else:
                        r.approaches.hear(approach)
                elif self._gives:
                    self._give(approach, self._values.recorded)

    def saw(self, given: Any) -> None:
        """A training forward begins, with these arguments."""
        ready, self._ready = self._ready, []
        for each in ready[:1]:
            if goes_on(given) or self._begun != each.begun:
                self._again.append(each.approach)
            else:
                with self._values.aside():
                    self._hand_over(each)
        for each in ready[1:]:
            self._runtime.approaches.hear(each.approach)

    def regrouped(self) -> None:
        """All have connected anew, one perhaps before it knew of what is ready here."""
        for approach in [*self._again, *(each.approach for each in self._ready)]:
            self._runtime.approaches.hear(approach)
        self._again, self._ready = [], []

    @property
    def _gives(self) -> bool:
        return self._runtime.world.rank == self._runtime.members[0]

    def _take(self, approach: Approach) -> Ready:
        r = self._runtime
        self._recorder.drop()
        content = self._taken.take(sys._getframe(), common=self._gives)
        with r.checkpoints.by_all():
            parts = {o: part for o in r.optimizers if (part := r.checkpoints.save(o)) is not None}
        return Ready(approach, content, parts, self._begun)

    @property
    def _begun(self) -> tuple[int, int]:
        return self._runtime.backwards, self._runtime.gathered

    def _give(self, approach: Approach, values: bytearray) -> None:
        """How far this rank is. values: that its script has read by then."""
        r = self._runtime
        told = {
            "step": r.step,
            "values": bytes(values[approach.known :]),
            "plan": self._recorder.plan,
            "giver": r.world.rank,
            "shares": r.shares,
        }
        assert isinstance(r.control, Control)  # there is an agent, which has told of the approach
        r.control.give(approach.number, plain.encode(told, "what a new worker is told"), r.generation)

    def _hand_over(self, ready: Ready) -> None:
        """All connect anew, with the new worker unless it has ended."""
        r, approach, giver = self._runtime, ready.approach, self._runtime.members[0]
        if r.world.rank == giver:
            self._give(approach, bytearray(ready.content["values"].numpy().tobytes()))
        r.connect_anew(PeerLost(f"rank {approach.rank} does not come"), r.config.timeout, ready.parts)
        state = plain.encode(ready.content, "what a new worker is given") if r.world.rank == giver else b""
        tell(r, state, lambda: approach.rank in r.members and giver in r.members)
        r.begin()


def tell(runtime: Runtime, state: bytes, wanted: Callable[[], bool]) -> list[bytes]:
    """Each rank's state, by rank of the group; all that are there call it. wanted: whether there is still anyone to
    give it to, and to give it."""
    while wanted():
        try:
            return runtime.tell("the state of the others", state)
        except CommError as error:
            runtime.connect_anew(error)
    return []
