"""Strangers meet running jobs: on another host of the network, as another user of the same host, and within a job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "hosts"), str(TESTS / "launch")]

from machine import Network, await_that, missing  # noqa: E402
from run import FOLDERS, SECONDS, Run, left_of  # noqa: E402


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Hosts h0 and h1 for the job, and h2 for the stranger."""
    if reason := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    network = Network(tmp_path_factory.mktemp("network"), 3)
    yield network
    try:
        await_that(lambda: not network.leftovers(), f"the end of {network.leftovers()}", 10.0)
    finally:
        network.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """start(script, *arguments, **env) -> a running `dadt run` of this host."""
    runs: list[Run] = []

    def begin(script: str, *arguments: str, **env: str) -> Run:
        runs.append(Run(tmp_path, script, list(arguments), env))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=SECONDS)
    for job in (tmp_path / "dadt-logs").glob("*"):
        await_that(lambda job=job: not left_of(job.name), f"the end of {left_of(job.name)}", 10.0)
        await_that(lambda job=job: not (FOLDERS / job.name).exists(), f"the end of {FOLDERS / job.name}", 10.0)
