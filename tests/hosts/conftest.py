"""Jobs over simulated machines. Whatever a job leaves behind on one of them fails its test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.host_run import HostRun
from harness.machine import Network, missing
from harness.patience import SETTLE_SECONDS, await_that
from harness.run import end


@pytest.fixture
def network_possible() -> None:
    if reason := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def hosts(network_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Network]]:
    """hosts(n) -> Network of n machines h0, h1, ..., and one more named launcher."""
    networks: list[Network] = []

    def make(count: int) -> Network:
        networks.append(Network(tmp_path_factory.mktemp("network"), count))
        return networks[-1]

    yield make
    try:
        for network in networks:
            await_that(
                lambda network=network: not network.leftovers(),
                f"the end of {network.leftovers()}",
                seconds=SETTLE_SECONDS,
            )
    finally:
        for network in networks:
            network.close()


@pytest.fixture
def start(
    hosts: Callable[[int], Network], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., HostRun]]:
    """start(network, script, *arguments, **env) -> a running `dadt run`. Ends before the machines do."""
    runs: list[HostRun] = []
    alone = request.node.get_closest_marker("alone") is not None

    def begin(network: Network, script: str, *arguments: object, **env: str) -> HostRun:
        runs.append(HostRun(network, tmp_path, script, list(map(str, arguments)), env, alone))
        return runs[-1]

    yield begin
    end(runs)
