"""Requests of the agent to a rank during training; all ranks act on a request after the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dadt.train.approaches import Approach, Approaches
from dadt.train.checkpoint_signal import CheckpointSignal
from dadt.train.common_step import CommonStep, Due
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.interruption import Interruption


class Requests:
    """Requests that one rank has received from its agent: to save a checkpoint, to stop (Ctrl-C), to let new workers
    join, and to do what another rank proposes."""

    def __init__(self) -> None:
        self.checkpoint_signal = CheckpointSignal()
        self.interruption = Interruption()
        self.approaches = Approaches()
        self._common_step: CommonStep | None = None
        self._proposals: dict[str, Due] = {}
        """What ranks have proposed to do together, by key, with the step after which all do it."""

    @property
    def finds_steps(self) -> bool:
        """Whether ranks find steps over the launcher after which all of them act."""
        return self._common_step is not None

    def agree_by(self, common_step: CommonStep) -> None:
        """Find by this the steps after which all ranks act, since their exchanges do not connect all of them."""
        self._common_step = common_step
        self.checkpoint_signal.common_step = self.interruption.common_step = common_step

    def hear_approach(self, approach: Approach, seconds: float) -> None:
        """Handle a request of new workers. seconds: how long to wait for ranks that have not heard it."""
        due = self.approaches.hear(approach)
        if self._common_step is not None:
            self._common_step.find(f"new worker {approach.number}", seconds, due.agree_on)

    def hear_proposal(self, key: str, seconds: float) -> None:
        """Handle what a rank proposes to do together, perhaps again. seconds: how long to wait for ranks that have not
        heard it."""
        if self._common_step is not None:
            self._common_step.find(key, seconds, self._proposals.setdefault(key, Due()).agree_on)

    def is_due(self, key: str, step: int) -> bool:
        """Return whether all ranks do now what this proposal says. step: number of steps that are complete."""
        return key in self._proposals and self._proposals[key].has_come(step)

    def forget_proposals(self) -> None:
        """Forget what was proposed, as a new worker that joins knows nothing of it. What still counts is proposed
        again. After a loss of ranks, those that are left have found the same steps as before."""
        self._proposals = {}

    @property
    def heard(self) -> dict[str, Any]:
        """The requests that this rank has received, as fields of StepMetadata; empty if ranks find a common step for
        each over the launcher."""
        if self._common_step is not None:
            return {}
        return {
            "saves": self.checkpoint_signal.heard,
            "interrupted": self.interruption.heard > 0,
            "approach": self.approaches.heard,
        }

    def agree(self, lanes: Sequence[StepMetadata]) -> None:
        """Learn from one exchange's metadata which requests each rank has received."""
        self.checkpoint_signal.agree([lane.saves for lane in lanes])
        self.interruption.agree([lane.interrupted for lane in lanes])
        self.approaches.agree([lane.approach for lane in lanes])

    def complete(self, step: int) -> None:
        """Called when a step is complete, before anything is done behind it: wait until it is known what is due. step:
        number of steps that are complete."""
        if self._common_step is not None:
            self._common_step.stepped(step)

    def stepped(self, step: int) -> None:
        """Deliver the signals that are due on all ranks. Called after a complete optimizer step. step: number of steps
        that are complete."""
        self.checkpoint_signal.stepped(step)
        self.interruption.stepped(step)
