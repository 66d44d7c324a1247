"""`dadt run`, and a look afterwards whether anything is left of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run import FOLDERS, SECONDS, Result, Run, await_that, left_of


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """start(script, *arguments, **env) -> Run. `-np 2 train.py` where no arguments are given."""
    runs: list[Run] = []

    def begin(script: str, *arguments: str, **env: str) -> Run:
        runs.append(Run(tmp_path, script, list(arguments) or ["-np", "2", "train.py"], env))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=SECONDS)
    for job in (tmp_path / "dadt-logs").glob("*"):
        await_that(lambda job=job: not left_of(job.name), f"the end of {left_of(job.name)}", 10.0)
        await_that(lambda job=job: not (FOLDERS / job.name).exists(), f"the end of {FOLDERS / job.name}", 10.0)


@pytest.fixture
def launch(start: Callable[..., Run]) -> Callable[..., Result]:
    """As `start`, and waits for the end."""
    return lambda script, *arguments, **env: start(script, *arguments, **env).finish()
