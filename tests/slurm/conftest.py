"""Jobs in a real Slurm. What a job leaves behind fails its test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing

sys.path.append(str(Path(__file__).parents[1] / "launch"))
sys.path.append(str(Path(__file__).parents[1] / "intruder"))
from run import FOLDERS, await_that, left_of


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[Cluster]:
    if reason := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(one_cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    yield one_cluster
    one_cluster.await_idle()
    for job in (tmp_path / "dadt-logs").glob("*"):
        await_that(lambda job=job: not left_of(job.name), f"the end of {left_of(job.name)}", 10.0)
        folders = FOLDERS.glob(f"{job.name}*")
        await_that(lambda folders=folders: not list(folders), f"the end of the folders of {job.name}", 10.0)
