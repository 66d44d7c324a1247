"""Jobs under real MPI launchers, and looks afterwards whether anything is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mpis import AS_ROOT, MPIRUNS, installed, shims

sys.path.append(str(Path(__file__).parents[1] / "launch"))
sys.path.append(str(Path(__file__).parents[1] / "train"))
from run import FOLDERS, SECONDS, Result, Run, await_that, left_of


@pytest.fixture(params=MPIRUNS)
def mpirun(request: pytest.FixtureRequest) -> str:
    """The name of an installed mpirun: each in turn."""
    return installed(request.param)


@pytest.fixture
def start(tmp_path: Path, mpirun: str) -> Iterator[Callable[..., Run]]:
    """start(script, *arguments, **env) -> a running `dadt run --launcher mpi` of this mpirun."""
    runs: list[Run] = []

    def begin(script: str, *arguments: str, **env: str) -> Run:
        given = ["--launcher", "mpi", "--mpirun", mpirun, *(arguments or ("-np", "2", "train.py"))]
        runs.append(Run(tmp_path, script, given, env))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=SECONDS)
    for job in (tmp_path / "dadt-logs").glob("*"):
        await_that(lambda job=job: not left_of(job.name), f"the end of {left_of(job.name)}", 10.0)
        await_that(lambda job=job: not shims(job.name), f"the end of {shims(job.name)}", 10.0)
        await_that(lambda job=job: not list(FOLDERS.glob(f"{job.name}*")), f"the end of {job.name}'s folders", 10.0)


@pytest.fixture
def launch(start: Callable[..., Run]) -> Callable[..., Result]:
    """As `start`, and waits for the end."""
    return lambda script, *arguments, **env: start(script, *arguments, **env).finish()


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """foreign(launcher, script, **env): two ranks of a script that mpirun or torchrun starts, without `dadt run`."""

    def run(launcher: str, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(script)
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
            timeout=150,
        )

    return run
