"""What the agent asks of a rank while it trains, and all ranks heed after the same step."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.train.approaches import Approaches
from dadt.train.checkpoint_signal import CheckpointSignal
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.train.interruption import Interruption


class Requests:
    """The requests that one rank has received."""

    def __init__(self) -> None:
        self.checkpoint_signal = CheckpointSignal()
        self.interruption = Interruption()
        self.approaches = Approaches()

    def agree(self, lanes: Sequence[StepMetadata]) -> None:
        """Learn from one exchange what each rank has received."""
        self.checkpoint_signal.agree(lane.saves for lane in lanes)
        self.interruption.agree([lane.interrupted for lane in lanes])
        self.approaches.agree(lane.approach for lane in lanes)

    def stepped(self) -> None:
        """A step is complete, and nothing of it is left to do: raise the signals that all ranks have received."""
        self.checkpoint_signal.stepped()
        self.interruption.stepped()
