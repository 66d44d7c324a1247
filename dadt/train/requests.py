"""Requests of the agent to a rank during training; all ranks act on a request after the same step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dadt.train.approaches import Approaches
from dadt.train.checkpoint_signal import CheckpointSignal
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.interruption import Interruption


class Requests:
    """Requests that one rank has received from its agent: to save a checkpoint, to stop (Ctrl-C), and to let new
    workers join."""

    def __init__(self) -> None:
        self.checkpoint_signal = CheckpointSignal()
        self.interruption = Interruption()
        self.approaches = Approaches()

    def meet_by(self, meet: Callable[[str, bytes, float], list[bytes]]) -> None:
        """Agree on the step of a signal by `meet`, over the launcher, as ranks of islands do (see CheckpointSignal)."""
        self.checkpoint_signal.meet = self.interruption.meet = meet

    @property
    def heard(self) -> dict[str, Any]:
        """The requests that this rank has received, as fields of StepMetadata."""
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

    def stepped(self, step: int) -> None:
        """Deliver the signals that are due on all ranks. Called after a complete optimizer step. step: number of steps
        that are complete."""
        self.checkpoint_signal.stepped(step)
        self.interruption.stepped(step)
