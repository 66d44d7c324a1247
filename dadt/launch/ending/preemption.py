"""Describes preemption: a scheduler takes a job's hosts away, so the workers save a checkpoint, and the job ends with
an exit code that makes the scheduler queue it again."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dadt.errors import DadtError
from dadt.launch.ending.failure import Ending

EXIT_CODE = os.EX_TEMPFAIL
"""Exit code 75, which sysexits.h defines for temporary failures that should be tried again later."""
MOST_LISTED = 64
"""Largest number of ranks that a text lists one by one."""


class Preempted(DadtError):
    """Raised when the job was preempted, so that it can be continued from the checkpoint that its script has saved."""

    exit_code = EXIT_CODE


@dataclass(frozen=True, slots=True)
class Preemption:
    """Facts about the preemption of a job, from its beginning until the workers have ended."""

    who: str
    """Text that says which host or process was asked to end, and how."""
    host: bool = False
    """Whether a host was asked to end rather than `dadt run` itself, so that the job may restart on other hosts."""
    follows: bool = False
    """Whether another host was lost at that time, so that the cluster has only ended all others (as Slurm does)."""
    endings: Mapping[int, Ending] = field(default_factory=dict)
    """How each rank's process has ended, by rank; empty until all have ended."""
    done: Collection[int] = ()
    """Ranks that reported the end of their training, even if their processes were stopped before they exited."""

    @property
    def text(self) -> str:
        """One line for the user: who was asked to end, and how the workers have ended."""
        endings = [self.endings[rank] for rank in sorted(self.endings)]
        ended = [each.rank for each in endings if (each.rank in self.done if each.stopped else each.code == 0)]
        stopped = [each.rank for each in endings if each.stopped and each.rank not in ended]
        failed = [each for each in endings if not each.stopped and each.code]
        parts = [f"{ranks(ended)} ended by {'themselves' if ended[1:] else 'itself'}"] if ended else []
        parts += [f"rank {each.rank} {each.text}" for each in failed]
        parts += [f"{ranks(stopped)} went on and {'were' if stopped[1:] else 'was'} stopped"] if stopped else []
        return f"{self.who}: preempted; {', '.join(parts) or 'no worker was there'} (exit code {EXIT_CODE})"


def ranks(numbers: Collection[int]) -> str:
    """Return a text that names these ranks, such as "rank 2" or "ranks 0, 2 and 3"; only their number if there are
    many, as in "256 ranks"."""
    if len(numbers) > MOST_LISTED:
        return f"{len(numbers):,} ranks"
    *most, last = map(str, sorted(numbers))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
