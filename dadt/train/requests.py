"""Requests of the agent to a rank during training; all ranks act on a request after the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dadt.train.approaches import Approach, Approaches
from dadt.train.checkpoint_signal import CheckpointSignal
from dadt.train.common_step import CommonStep
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.interruption import Interruption


class Requests:
    """Requests that one rank has received from its agent: to save a checkpoint, to stop (Ctrl-C), and to let new
    workers join."""

    def __init__(self) -> None:
        self.checkpoint_signal = CheckpointSignal()
        self.interruption = Interruption()
        self.approaches = Approaches()
        self._common_step: CommonStep | None = None

    def agree_by(self, common_step: CommonStep) -> None:
        """Find by this the steps after which all ranks act, since their exchanges do not connect all of them."""
        self._common_step = common_step
        self.checkpoint_signal.common_step = self.interruption.common_step = common_step

    def hear_approach(self, approach: Approach, seconds: float) -> None:
        """Handle a request of new workers. seconds: how long to wait for ranks that have not heard it."""
        request = self.approaches.hear(approach)
        if self._common_step is not None:
            self._common_step.find(f"new worker {approach.number}", seconds, request.agree_on)

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
