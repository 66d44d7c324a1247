"""Many hosts are connected to at once, and twice where that may help."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import Any

import pytest
from harness.patience import PATIENCE

from dadt.errors import LaunchError
from dadt.launch.hosts.host import Host
from dadt.launch.ssh.attempt import AT_ONCE, Attempts, Transient

HOSTS = [Host(name=f"h{number}") for number in range(100)]


def test_so_many_at_once_and_no_more() -> None:
    lock = threading.Lock()
    full = threading.Event()
    running, most = 0, 0

    def attempt(host: Host, deadline: float) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == AT_ONCE:
                full.set()
        assert full.wait(PATIENCE)
        with lock:
            running -= 1
        return host.name

    futures = Attempts(attempt).begin(HOSTS, 20.0)
    assert [future.result(20.0) for future in futures] == [host.name for host in HOSTS]
    assert most == AT_ONCE


def test_only_what_may_pass_is_tried_again_and_once() -> None:
    tried: list[str] = []

    def attempt(host: Host, deadline: float) -> Any:
        tried.append(host.name)
        if host.name == "h0" and tried.count("h0") == 1:
            raise Transient("not now")
        if host.name == "h1":
            raise Transient("not now")
        if host.name == "h2":
            raise LaunchError("never")
        return host.name

    futures = Attempts(attempt).begin(HOSTS[:4], 20.0)
    wait(futures, 20.0)
    assert [str(future.exception()) for future in futures] == ["None", "not now", "never", "None"]
    assert [tried.count(host.name) for host in HOSTS[:4]] == [2, 2, 1, 1]


def test_none_begins_after_the_end() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def attempt(host: Host, deadline: float) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        raise Transient("not now")

    attempts = Attempts(attempt)
    futures = attempts.begin(HOSTS, 20.0)
    assert begun.wait(PATIENCE)
    attempts.close()
    waiting = [future for future in futures if future.cancel()]
    go_on.set()
    assert len(waiting) >= len(HOSTS) - AT_ONCE
    for future in futures:
        if future not in waiting:
            with pytest.raises(Transient):
                future.result(10.0)
