"""Requests of the agent to a rank during training; all ranks act on a request after the same step."""

from __future__ import annotations

from collections.abc import Sequence

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

    def agree(self, lanes: Sequence[StepMetadata]) -> None:
        """Learn from one exchange's metadata which requests each rank has received."""
        self.checkpoint_signal.agree([lane.saves for lane in lanes])
        self.interruption.agree([lane.interrupted for lane in lanes])
        self.approaches.agree([lane.approach for lane in lanes])

    def stepped(self) -> None:
        """Deliver the signals that are due on all ranks. Called after a complete optimizer step."""
        self.checkpoint_signal.stepped()
        self.interruption.stepped()
