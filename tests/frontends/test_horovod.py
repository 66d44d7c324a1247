"""Horovod's API for torch: each operation, optimizer and state, in scripts that import horovod."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, forkserver
from harness.patience import PATIENCE

FILES = ("horovod_operations", "horovod_optimizers")


def checks_of(file: str) -> list[str]:
    return re.findall(r"^@check\ndef (\w+)\(", (SCRIPTS / f"{file}.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """ran(file, ranks) -> the folder of what failed, for each script and number of ranks."""
    assert importlib.util.find_spec("horovod") is None

    @functools.cache
    def run(file: str, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{file}-{ranks}")
        limit = ["--timeout", "30"] if ranks == 4 else []  # without, an operation takes as long as it takes
        command = [forkserver.dadt(), "run", "-np", str(ranks), *limit]
        done = subprocess.run(
            [*command, str(SCRIPTS / f"{file}.py"), str(folder)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "horovod is not installed: DADT takes its place, with --algorithm sync" in done.stderr
        assert len(list(folder.glob("done.*"))) == ranks, done.stderr
        return folder

    return run


def cases() -> Iterator[Any]:
    """Operations by two and four ranks; optimizers by two, as they are made of these, and by four in test-slow."""
    for file in FILES:
        for ranks in (2, 4):
            marks = [pytest.mark.slow] if (file, ranks) == ("horovod_optimizers", 4) else []
            for check in checks_of(file):
                yield pytest.param(file, ranks, check, id=f"{ranks}-{file}-{check}", marks=marks)


@pytest.mark.parametrize(("file", "ranks", "check"), [*cases()])
def test_horovod(ran, file: str, ranks: int, check: str) -> None:
    assert [path.read_text() for path in ran(file, ranks).glob(f"{check}.*")] == []
