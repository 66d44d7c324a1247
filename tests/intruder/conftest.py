"""Strangers meet running jobs: on another host of the network, as another user of the same host, and within a job."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from harness.machine import Network, missing
from harness.patience import SETTLE_SECONDS, await_that


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
        await_that(lambda: not network.leftovers(), f"the end of {network.leftovers()}", seconds=SETTLE_SECONDS)
    finally:
        network.close()
