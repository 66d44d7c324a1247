"""The signal that a script answers by saving a checkpoint: who gets it, and whom it would kill instead.

Ranks that train raise it themselves, all after the same step (dadt/train/checkpoint_signal.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dadt.launch.processes import Process

_MOST_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class CheckpointSignal:
    number: int
    grace: float
    """Seconds that workers have to save, once the job or this host is preempted."""
    alone: bool
    """Where this host is preempted, workers of the others train on, and do not save."""

    @property
    def patience(self) -> float:
        """Seconds that ranks may take to agree on a step."""
        return min(self.grace / 4, _MOST_PATIENCE)

    def send(
        self, processes: Mapping[int, Process], tell: Callable[[Collection[int], float], set[int]], *, together: bool
    ) -> list[int]:
        """Send it to the process of each rank. Returns the ranks that have no handler for it: they get none, as it
        would kill them. tell: has ranks raise it themselves within these seconds; returns those that do. together: the
        ranks of all hosts get it.

        Only this process gets it: a DataLoader's workers have its handlers, too, and would save as well.
        """
        living = {rank: process for rank, process in processes.items() if process.is_alive}
        heedless = [rank for rank, process in living.items() if not _handles(process.pid, self.number)]
        told = tell(living.keys() - heedless, self.patience if together else 0.0)
        for rank in living.keys() - {*heedless, *told}:
            living[rank].signal(self.number)
        return heedless


def _handles(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return True  # it has just ended
    caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
