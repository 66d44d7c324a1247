"""A job whose hosts are taken away: its workers save a checkpoint, and it ends so that it is queued again."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dadt.errors import DadtError
from dadt.launch.ending.failure import Ending

EXIT_CODE = os.EX_TEMPFAIL
"""75, which sysexits.h gives to what fails for now and is to be tried again later."""


class Preempted(DadtError):
    """The job was preempted: it can go on from its script's checkpoint."""

    exit_code = EXIT_CODE


@dataclass(frozen=True, slots=True)
class Preemption:
    """A job that is being preempted, or was."""

    who: str
    """Who was asked to end, and how."""
    host: bool = False
    """Whether a host was asked to end, not `dadt run`: the job may start again elsewhere."""
    endings: Mapping[int, Ending] = field(default_factory=dict)
    """How each rank has ended, once all have."""
    done: Collection[int] = ()
    """Ranks that have reported their end, even if their process was stopped in the midst of it."""

    @property
    def text(self) -> str:
        """One line: who was asked to end, and how the workers have answered."""
        endings = [self.endings[rank] for rank in sorted(self.endings)]
        ended = [each.rank for each in endings if (each.rank in self.done if each.stopped else each.code == 0)]
        stopped = [each.rank for each in endings if each.stopped and each.rank not in ended]
        failed = [each for each in endings if not each.stopped and each.code]
        parts = [f"{ranks(ended)} ended by {_itself(ended)}"] if ended else []
        parts += [f"rank {each.rank} {each.text}" for each in failed]
        parts += [f"{ranks(stopped)} went on and {_was(stopped)} stopped"] if stopped else []
        return f"{self.who}: preempted; {', '.join(parts) or 'no worker was there'} (exit code {EXIT_CODE})"


def ranks(numbers: Collection[int]) -> str:
    """The ranks as text: rank 2; ranks 0, 2 and 3."""
    *most, last = map(str, sorted(numbers))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _itself(numbers: Sequence[int]) -> str:
    return "itself" if len(numbers) == 1 else "themselves"


def _was(numbers: Sequence[int]) -> str:
    return "was" if len(numbers) == 1 else "were"
