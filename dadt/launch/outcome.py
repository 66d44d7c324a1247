"""How a job ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dadt.errors import DadtError
from dadt.launch.failure import Failure, signal_name


@dataclass(kw_only=True)
class Outcome:
    """What is known when nothing of the job is left."""

    seconds: float
    failure: Failure | None = None
    signal: int = 0
    """The signal by which the user ended it."""
    summaries: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """What each rank reported at the end of its training."""
    results: Mapping[int, bytes] = field(default_factory=dict)
    """What each rank's function returned or raised, where `dadt.run` has called one."""
    hooked: bool = False
    """At least one worker imported torch with DADT hooked in."""
    stepped: bool = False
    """An optimizer of theirs has made a step, also where the process has ended by os._exit and told nothing."""
    stuck: Sequence[int] = ()
    """Processes that did not die of SIGKILL."""

    @property
    def exit_code(self) -> int:
        if self.signal:
            return 128 + self.signal
        return self.failure.exit_code if self.failure else 0


class Unread(DadtError):
    """Ended by the user while nobody read our output."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal_name(number)} while nobody read the output; all workers stopped")
        self.exit_code = 128 + number
