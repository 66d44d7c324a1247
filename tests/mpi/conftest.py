"""Jobs under real MPI launchers, and looks afterwards whether anything is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import forkserver, lightened
from harness.job import starter
from harness.mpis import AS_ROOT, MPIRUNS, by_mpirun, installed, shims
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that
from harness.run import Run, await_nothing_left, end


@pytest.fixture(params=MPIRUNS)
def mpirun(request: pytest.FixtureRequest) -> str:
    """The name of an installed mpirun: each in turn."""
    return installed(request.param)


@pytest.fixture
def start(tmp_path: Path, mpirun: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """start(script, *arguments, **env) -> a running `dadt run --launcher mpi` of this mpirun."""
    runs: list[Run] = []
    alone = request.node.get_closest_marker("alone") is not None

    def begin(script: str, *arguments: str, **env: str) -> Run:
        given = ["--launcher", "mpi", "--mpirun", mpirun, *(arguments or ("-np", "2", "train.py"))]
        runs.append(Run(tmp_path, script, given, env, alone))
        return runs[-1]

    yield begin
    end(runs)
    for job in (tmp_path / "dadt-logs").glob("*"):
        await_that(lambda job=job: not shims(job.name), f"the end of {shims(job.name)}", seconds=SETTLE_SECONDS)
    await_nothing_left(tmp_path)


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """foreign(launcher, script, **env): two ranks of a script that mpirun or torchrun starts, without `dadt run`.

    alone: as for `run` in tests/harness/job.py.
    """

    def run(launcher: str, script: str, alone: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(lightened(script) if alone else script)
        command = starter("torchrun", 2, alone)
        if launcher != "torchrun":
            command = [*by_mpirun(launcher, 2), sys.executable if alone else forkserver.python()]
        return subprocess.run(
            [*command, "train.py"],
            cwd=tmp_path,
            env={**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    return run
