"""`dadt check-env -H` over simulated machines that differ."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.machine import Machine, Network
from harness.patience import PATIENCE
from harness.run import DADT

import dadt
from dadt_cli.check_env import SUBJECTS

pytestmark = pytest.mark.timeout(660)


def check_env(network: Network, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*DADT, "check-env", "--ssh-config", network.config, *arguments]
    return subprocess.run(
        network.launcher.enter(command, "/tmp"),
        env={**os.environ, "HOME": str(network.launcher.home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
    )


def change(machine: Machine, folder: Path, name: str, text: str, other: str) -> None:
    """A file of dadt, as this one machine sees it."""
    file = Path(dadt.__file__).parent / name
    assert text in file.read_text()
    changed = folder / file.name
    changed.write_text(file.read_text().replace(text, other))
    machine.run("mount", "--bind", changed, file)


def verdicts(told: dict[str, Any], host: str) -> dict[tuple[str, str], dict[str, str]]:
    (one,) = [each for each in told["hosts"] if each["name"] == host]
    return {(check["subject"], check["name"]): check for check in one["checks"]}


SLOW_TO_H1 = """
tc qdisc add dev eth0 root handle 1: htb default 10
tc class add dev eth0 parent 1: classid 1:10 htb rate 10gbit
tc class add dev eth0 parent 1: classid 1:20 htb rate 48kbit burst 100 cburst 100
tc filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dst 10.7.0.2/32 flowid 1:20
"""


def test_what_is_wrong_between_two_hosts(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    """A torch that cannot be imported spares this test the trainings."""
    network = hosts(2)
    first, second = network.hosts
    first.run("sh", "-e", "-c", SLOW_TO_H1)
    (first.home / ".bashrc").write_text("echo Welcome, friend\n")
    second.run("hostname", "h0")
    (second.folder / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 h0\n")
    change(second, tmp_path, "launch/agent/agent.py", '"date": time.time()', '"date": time.time() + 5.0')
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    prologue = f"export PYTHONPATH={tmp_path} https_proxy=http://proxy:3128 no_proxy=localhost,127.0.0.1,h0"
    done = check_env(network, "-H", network.list(), "--prologue", prologue, "--json")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    between = {check["name"]: check for check in told["between"]}
    assert between["connections"]["verdict"] == "pass"
    assert between["host names"]["verdict"] == "fail"
    assert between["host names"]["value"] == "h0 and h1 all call themselves h0"
    assert "round trip" in between, told["hosts"]
    assert between["round trip"]["verdict"] == "warn" and between["round trip"]["value"].endswith(" ms h0-h1")
    assert between["core files"]["verdict"] == "warn"
    (pair,) = told["pairs"]
    assert (pair["from"], pair["to"]) == ("h0", "h1") and pair["round_trip_ms"] > 5.0
    one, other = verdicts(told, "h0"), verdicts(told, "h1")
    assert one["ssh", "shell"]["value"] == "prints before it runs a command: 'Welcome, friend'"
    assert ("ssh", "shell") not in other
    assert (one["hosts", "clock"]["verdict"], other["hosts", "clock"]["verdict"]) == ("pass", "warn")
    ahead = re.match(r"(\d+\.\d) s ahead", other["hosts", "clock"]["value"])
    assert ahead is not None and 4.0 < float(ahead[1]) < 5.5  # less where what the host told was under way for long
    assert (one["network", "host name"]["verdict"], other["network", "host name"]["verdict"]) == ("pass", "warn")
    assert one["variables", "proxies"]["value"] == "https_proxy, and no_proxy leaves out 10.7.0.1, h1, 10.7.0.2"
    assert "libcudart.so.12" in one["torch", "import"]["value"]
    assert all(check["hint"] for check in [*told["between"], *one.values()] if check["verdict"] != "pass")


@pytest.mark.slow
def test_hosts_that_differ_and_one_that_cannot_take_part(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    network = hosts(4)
    network[1].run("ip", "link", "set", "eth0", "mtu", "1400")
    network[1].run("mount", "-o", "remount,size=64m", "/dev/shm")
    change(network[2], tmp_path, "config/version.py", f'VERSION = "{dadt.__version__}"', 'VERSION = "0.0.9"')
    network.configure("h3", Port=77)
    done = check_env(network, "-H", network.list(), "--json")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    for host in ("h0", "h1"):
        assert {subject for subject, _ in verdicts(told, host)} == {*SUBJECTS, "hosts", "ssh"}
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
    assert between["network MTU"]["hint"].startswith("ip link set")
    assert between["connections"]["verdict"] == "pass"
    assert "10.7.0.2" in verdicts(told, "h1")["hosts", "address"]["value"]


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other_and_a_short_text(hosts: Callable[[int], Network]) -> None:
    network = hosts(2)
    network[1].run("ip", "route", "add", "blackhole", network[0].address)
    network[1].run("ip", "-6", "route", "add", "blackhole", network[0].address6)
    done = check_env(network, "-H", network.list())
    assert done.returncode == 1, done.stdout
    assert "no way between hosts" in done.stdout and "-> open the firewall between them" in done.stdout
    # What is the same on both comes once.
    assert done.stdout.count("2 workers trained to the same weights") in (1, 2)  # with the seconds that it took
    assert sum(line.split()[:3] == ["pass", "entry", "point"] for line in done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_a_full_check_trains_over_all_hosts(hosts: Callable[[int], Network]) -> None:
    network = hosts(2)
    network[1].slow("1gbit")
    done = check_env(network, "-H", network.list(), "--json", "--full")
    told = json.loads(done.stdout)
    between = {check["name"]: check for check in told["between"]}
    assert between["training"]["verdict"] == "pass", between
    assert "GB/s" in between["speed"]["value"]
    # Virtual cards call themselves 10 Gbit/s; one direction alone is slowed down.
    assert between["bandwidth"]["verdict"] == "warn" and "of 10 from h1 to h0" in between["bandwidth"]["value"]
    speeds = {pair["from"]: pair["gbit_per_s"] for pair in told["pairs"]}
    assert speeds["h1"] <= 1.01, speeds
