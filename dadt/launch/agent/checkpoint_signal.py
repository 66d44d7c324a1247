"""The signal that a script answers by saving a checkpoint: who gets it, and whom it would kill instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dadt.launch.processes import is_alive, kill


@dataclass(frozen=True, slots=True)
class CheckpointSignal:
    number: int
    grace: float
    """Seconds that workers have to save, once the job or this host is preempted."""

    def send(self, pids: Mapping[int, int]) -> list[int]:
        """Send it to the process of each rank. Returns the ranks that have no handler for it: they get none, as it
        would kill them.

        Only this process gets it: a DataLoader's workers have its handlers, too, and would save as well.
        """
        living = {rank: pid for rank, pid in pids.items() if is_alive(pid)}
        heedless = [rank for rank, pid in living.items() if not _handles(pid, self.number)]
        kill((pid for rank, pid in living.items() if rank not in heedless), self.number)
        return heedless


def _handles(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return True  # it has just ended
    caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
