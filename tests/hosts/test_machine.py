"""The simulated machines are what the other tests take them for."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness import TESTS
from harness.machine import Machine, Network
from harness.patience import PATIENCE, await_that


def ssh(network: Network, *words: object) -> subprocess.CompletedProcess[str]:
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectTimeout=2"]
    command = network.launcher.enter(["ssh", "-F", network.config, *options, *words])
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)


def reaches(machine: Machine, address: str) -> bool:
    with machine.entered():
        try:
            socket.create_connection((address, 22), timeout=1.0).close()
        except OSError:
            return False
    return True


def test_each_machine_has_its_own_name_home_folders_and_processes(hosts: Callable[[int], Network]) -> None:
    network = hosts(2)
    for host in network.hosts:
        done = ssh(network, host.name, "hostname; echo ~; echo $$; ls -A /tmp/dadt-0 /dev/shm; cat /proc/1/comm")
        name, home, pid, *rest = done.stdout.splitlines()
        assert (name, home) == (host.name, str(host.home)), done
        assert int(pid) < 100
        assert rest == ["/dev/shm:", "", "/tmp/dadt-0:", "sshd"]


def test_cut_drops_both_directions_silently_and_heal_restores(hosts: Callable[[int], Network]) -> None:
    network = hosts(2)
    one, two = network.hosts
    for machine, address in [(one, two.address), (two, one.address6), (network.launcher, two.address6)]:
        await_that(lambda machine=machine, address=address: reaches(machine, address), f"the way to {address}")
    network.cut(two)
    assert not reaches(one, two.address)
    assert not reaches(two, one.address)
    assert reaches(network.launcher, one.address)
    network.heal(two)
    await_that(lambda: reaches(one, two.address), "the network")


def test_slow_limits_what_a_machine_sends(hosts: Callable[[int], Network]) -> None:
    network = hosts(1)
    network[0].slow()
    assert "rate 1Gbit" in network[0].run("tc", "qdisc", "show", "dev", "eth0")


def test_leftovers_are_seen(hosts: Callable[[int], Network]) -> None:
    network = hosts(1)
    assert network.leftovers() == []
    command = "mkdir /tmp/dadt-0/abcd; setsid sleep 60 >/dev/null 2>&1 </dev/null & echo"
    assert ssh(network, "h0", command).returncode == 0
    await_that(lambda: len(network.leftovers()) == 2, "both")  # the shell may be quicker than what it has started
    left = network.leftovers()
    assert len(left) == 2 and "abcd" in left[0] and "sleep 60" in left[1]
    for pid in network[0].processes():
        subprocess.run(["kill", str(pid)], check=True)
    network[0].path("/tmp/dadt-0/abcd").rmdir()


def test_a_shell_and_a_host_key_can_be_changed(hosts: Callable[[int], Network]) -> None:
    network = hosts(1)
    before = network[0].fingerprint
    assert ssh(network, "h0", "true").returncode == 0
    network[0].set_shell("/bin/csh")
    assert ssh(network, "trainer@h0", "echo $shell").stdout == "/bin/csh\n"
    network[0].new_host_key()
    assert network[0].fingerprint != before
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh(network, "h0", "true").stderr


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harness.machine import Network
network = Network(Path(sys.argv[2]), 1)
print(network.launcher.pid, network[0].pid, network._switch.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_machines_end_with_the_tests_even_if_those_are_killed(network_possible: None, tmp_path: Path) -> None:
    folder = TESTS
    done = subprocess.run([sys.executable, "-c", KILLED, folder, tmp_path], stdout=subprocess.PIPE, text=True)
    pids = done.stdout.split()
    assert done.returncode == -9 and len(pids) == 3
    await_that(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"the end of {pids}")
