"""Jobs in a real Ray cluster. What a job leaves behind fails its test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.machine import missing
from harness.patience import SETTLE_SECONDS, await_that
from ray_cluster import Cluster


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("ray"), '--num-cpus=2 --resources={"ssd":2}', "--num-cpus=2 --num-gpus=2")
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(one_cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    yield one_cluster
    try:
        for words in ("dadt", "train.py"):
            left = one_cluster.processes(words)
            await_that(
                lambda words=words: not one_cluster.processes(words), f"the end of {left}", seconds=SETTLE_SECONDS
            )
    finally:
        for pid in one_cluster.of(one_cluster.head, "/dadt run "):  # of a test that failed
            os.kill(pid, signal.SIGKILL)
    await_that(lambda: one_cluster.left() == "([], 0.0)", f"Ray's: {one_cluster.left()}", seconds=SETTLE_SECONDS)
