"""Many names of one host, whose sshd lets ten log in at once, as it does by default."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dialogue import BACKENDS, launched
from harness.machine import Network


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_sshd_is_not_asked_for_more_than_it_lets_in(hosts: Callable[[int], Network], backend: str) -> None:
    network = hosts(1)
    network[0].reload("MaxStartups 10:100:10")
    names = [f"name{number}" for number in range(14)]
    for name in names:
        network.configure(name, HostName=network[0].address)
    with launched(network, backend, *names) as futures:
        for future in futures:
            future.result()
    log = network[0].log.read_text()
    assert log.count("Accepted publickey") == len(names)
    # A busy sshd may still count some that are in already; those that it drops come again.
    assert log.count("drop connection") < 5
