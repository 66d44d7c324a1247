"""Ctrl-C, as a terminal gives it to a script that it runs: by SIGINT."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from dadt.control.frame import Frame
from dadt.launch.agent.registry import WorkerRegistry
from dadt.launch.agent.worker import Worker
from dadt.launch.processes import kill

_MOST_PATIENCE = 5.0


def interrupt(workers: Iterable[Worker], registry: WorkerRegistry, grace: float) -> None:
    """Send SIGINT to these workers. Processes that train raise it themselves, all after the same step, if they come to
    one soon (dadt/train/interruption.py). grace: seconds until SIGTERM."""
    living = {worker.rank: worker for worker in workers if not worker.ended}
    patience = min(grace / 4, _MOST_PATIENCE)
    told = registry.tell_training(living.keys(), Frame("interrupt", {"patience": patience}))
    for rank, worker in living.items():
        if rank not in told:
            worker.signal(signal.SIGINT)
        elif registry.pid_of(worker) != worker.pid:
            kill([worker.pid], signal.SIGINT)  # a shell, which would go on to its next command
