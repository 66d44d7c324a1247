"""Checks for processes that this user's jobs have left running on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator

from dadt.launch.local_jobs import Trace, traces
from dadt_cli.check_env.check import Check, CheckOptions, good, warn

ENDING_SECONDS = 6.0
"""Seconds to wait for the last processes of a job that is just ending."""


def checks(asked: CheckOptions) -> Iterator[Check]:
    found = _abandoned()
    deadline = time.monotonic() + ENDING_SECONDS
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [trace for trace in _abandoned() if trace.job in {before.job for before in found}]
    for trace in found:
        pids = ", ".join(map(str, trace.pids))
        yield warn(f"job {trace.job}", f"nobody owns its processes {pids} any more", f"dadt kill {trace.job}")
    if not found:
        yield good("processes", "none")


def _abandoned() -> list[Trace]:
    return [trace for trace in traces() if trace.is_abandoned]
