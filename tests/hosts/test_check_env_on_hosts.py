"""`dadt check-env -H` over simulated machines that differ."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostrun import SECONDS
from machine import Machine, Network
from run import DADT

import dadt
from dadt import checks

pytestmark = pytest.mark.slow


def check_env(network: Network, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*DADT, "check-env", "--ssh-config", network.config, *arguments]
    return subprocess.run(
        network.launcher.enter(command, "/tmp"),
        env={**os.environ, "HOME": str(network.launcher.home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5 * SECONDS,
    )


def install_another(machine: Machine, folder: Path, version: str) -> None:
    """Of dadt, as this one machine sees it."""
    file = Path(dadt.__file__)
    text = file.read_text()
    assert f'__version__ = "{dadt.__version__}"' in text
    other = folder / "other.py"
    other.write_text(text.replace(f'__version__ = "{dadt.__version__}"', f'__version__ = "{version}"'))
    machine.run("mount", "--bind", other, file)


def verdicts(told: dict[str, Any], host: str) -> dict[tuple[str, str], dict[str, str]]:
    (one,) = [each for each in told["hosts"] if each["name"] == host]
    return {(check["subject"], check["name"]): check for check in one["checks"]}


def test_hosts_that_differ_and_one_that_cannot_take_part(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    network = hosts(4)
    network[1].run("ip", "link", "set", "eth0", "mtu", "1400")
    network[1].run("mount", "-o", "remount,size=64m", "/dev/shm")
    install_another(network[2], tmp_path, "0.0.9")
    network.configure("h3", Port=77)
    done = check_env(network, "-H", network.list(), "--json")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    for host in ("h0", "h1"):
        assert {subject for subject, _ in verdicts(told, host)} == {*checks.SUBJECTS, "hosts", "ssh"}
    assert verdicts(told, "h0")["limits", "/dev/shm"]["verdict"] == "pass"
    assert verdicts(told, "h1")["limits", "/dev/shm"]["verdict"] == "warn"
    (other,) = verdicts(told, "h2").values()
    assert (other["verdict"], other["subject"]) == ("fail", "ssh")
    assert other["value"] == f"dadt 0.0.9 is installed there, {dadt.__version__} here"
    assert other["hint"].startswith("install the same version")
    (unreached,) = verdicts(told, "h3").values()
    assert "connection refused" in unreached["value"] and "-p PORT" in unreached["hint"]
    between = {check["name"]: check for check in told["between"]}
    assert between["network MTU"]["value"] == "1500 on h0; 1400 on h1"
    assert between["connections"]["verdict"] == "pass"
    assert "10.7.0.2" in verdicts(told, "h1")["hosts", "address"]["value"]


def test_hosts_that_do_not_reach_each_other_and_a_short_text(hosts: Callable[[int], Network]) -> None:
    network = hosts(2)
    network[1].run("ip", "route", "add", "blackhole", network[0].address)
    network[1].run("ip", "-6", "route", "add", "blackhole", network[0].address6)
    done = check_env(network, "-H", network.list())
    assert done.returncode == 1, done.stdout
    assert "no way between hosts" in done.stdout and "-> open the firewall between them" in done.stdout
    # What is the same on both comes once.
    assert done.stdout.count("2 workers trained to the same weights") == 2
    assert sum(line.split()[:3] == ["pass", "entry", "point"] for line in done.stdout.splitlines()) == 1


@pytest.mark.timeout(400)
def test_a_full_check_trains_over_all_hosts(hosts: Callable[[int], Network]) -> None:
    network = hosts(2)
    done = check_env(network, "-H", network.list(), "--json", "--full")
    between = {check["name"]: check for check in json.loads(done.stdout)["between"]}
    assert between["training"]["verdict"] == "pass", between
    assert "GB/s" in between["speed"]["value"]
