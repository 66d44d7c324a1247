"""Jobs of scripts: one for a test, or one for several tests of a module."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Run, runner


@pytest.fixture
def dadt_run(tmp_path: Path):
    """dadt_run(script, *options, np=2) runs the script; whatever a rank gives to `report` is in Run.ranks."""
    return runner(tmp_path)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory):
    """As dadt_run, for a job that several tests of a module look at, by `Run.of`."""

    def run(script: str, *options: str) -> Run:
        return runner(tmp_path_factory.mktemp("shared"))(script, *options, check=False)

    return run
