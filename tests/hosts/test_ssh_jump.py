"""Hosts behind another share the connection to it."""

from __future__ import annotations

import os
from collections.abc import Callable

from dialogue import ask, launched
from harness.machine import Network

from dadt.config import Config
from dadt.launch.hosts.host import Host
from dadt.launch.launchers.ssh import SshLauncher

Hosts = Callable[[int], Network]


def test_many_hosts_behind_one_share_the_way(hosts: Hosts) -> None:
    network = hosts(4)
    network[0].reload("MaxStartups 1")
    for number in (1, 2, 3):
        network.configure(f"h{number}", ProxyJump="h0")
    with launched(network, "paramiko", "h1", "h2", "h3") as futures:
        assert [ask(future.result())["hostname"] for future in futures] == ["h1", "h2", "h3"]
    assert network[0].log.read_text().count("Accepted publickey") == 1


def test_a_way_that_was_lost_is_made_anew(hosts: Hosts) -> None:
    network = hosts(2)
    network.configure("h1", ProxyJump="h0")
    launcher = SshLauncher(Config(ssh_config=str(network.config), start_timeout=20.0))
    with network.launcher.entered():
        (first,) = launcher.launch([Host(name="h1")])
        ask(first.result(20.0))
        for pid in network[0].sessions():
            os.kill(pid, 9)
        assert first.result().end(5.0).startswith("the connection was lost")
        (second,) = launcher.launch([Host(name="h1")])
        assert ask(second.result(20.0))["hostname"] == "h1"
        assert second.result().end(5.0) == ""
        launcher.close()
