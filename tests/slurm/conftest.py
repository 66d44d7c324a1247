"""Jobs in a real Slurm. What a job leaves behind fails its test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing
from harness.run import await_nothing_left


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
    await_nothing_left(tmp_path)
