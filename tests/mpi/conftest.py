"""Jobs under real MPI launchers, and looks afterwards whether anything is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import lightened
from harness.mpis import AS_ROOT, MPIRUNS, installed, shims
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
    """foreign(launcher, script, **env): two ranks of a script that mpirun or torchrun starts, without `dadt run`."""

    def run(launcher: str, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(lightened(script))
        count = ["--nproc-per-node", "2"] if launcher == "torchrun" else [sys.executable]
        program = str(Path(sys.executable).with_name("torchrun")) if launcher == "torchrun" else launcher
        options = [] if launcher == "torchrun" else ["-np", "2"]
        if launcher == "mpirun.openmpi":
            options.append("--oversubscribe")
        return subprocess.run(
            [program, *options, *count, "train.py"],
            cwd=tmp_path,
            env={**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    return run
