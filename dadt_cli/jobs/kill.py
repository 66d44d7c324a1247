"""`dadt kill`: ends one job, named by its id."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import click

from dadt.control.frame import Frame
from dadt.errors import DadtError
from dadt.launch.local_jobs import Trace
from dadt.launch.query import CallerLine
from dadt_cli.jobs.find import find, jobs
from dadt_cli.terminal import console

HARD_SECONDS = 10.0
"""Seconds to wait after the job's grace period. Then the launcher is killed together with all processes that it
started."""


@click.command()
@click.argument("job", shell_complete=jobs)
def kill(job: str) -> int:
    """End JOB as Ctrl-C does, and kill what is left after its grace period."""
    trace = find(job)
    line = trace.call()
    if line is None:
        return _kill_here(trace)
    with line:
        return _kill_by_launcher(trace, line)


def _kill_by_launcher(trace: Trace, line: CallerLine) -> int:
    try:
        answer = next(line.ask(Frame("kill")), None)
    except TimeoutError:
        answer = None
    if answer is None:
        console.answer(f"its launcher (pid {line.pid}) does not answer: it is killed, too")
    elif line.ended(answer["grace"] + HARD_SECONDS):
        console.answer(f"job {trace.job} has ended: {_named(answer['workers'])}")
        return 0
    os.kill(line.pid, signal.SIGKILL)
    return _kill_here(trace)


def _kill_here(trace: Trace) -> int:
    ended = [f"rank {rank} (pid {pid})" for rank, pid in sorted(trace.workers.items())]
    others = len(trace.pids) - len(trace.workers)
    left = trace.kill()
    if left:
        raise DadtError(
            f"job {trace.job}: processes {', '.join(map(str, left))} do not end, even when"
            " killed, as where they hang in the kernel (device, file server)"
        )
    also = [f"{others} other process{'es' if others > 1 else ''}"] if others else []
    console.answer(f"job {trace.job} has ended on this machine: {_named(ended + also)}")
    return 0


def _named(what: Sequence[str]) -> str:
    return ", ".join(what) or "nothing of it ran any more"
