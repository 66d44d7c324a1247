"""The ways to a host, and what its shell may do before the agent speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

import pytest
from dialogue import BACKENDS, ask, launched, outcome
from harness import TESTS
from harness.machine import Network, new_key
from harness.patience import PATIENCE, SETTLE_SECONDS, await_that

Hosts = Callable[[int], Network]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def hide(network: Network, number: int, *behind: int) -> str:
    """Give a host an address that only the hosts before it know a way to."""
    address = f"10.8.0.{number + 1}"
    network[number].run("ip", "addr", "add", f"{address}/32", "dev", "lo")
    for other in behind:
        network[other].run("ip", "route", "add", address, "via", network[number].address)
    network.configure(f"h{number}", HostName=address)
    return address


def test_many_hosts_are_connected_to_at_once(hosts: Hosts, backend: str) -> None:
    network = hosts(4)
    network.forget()
    with launched(network, backend, "h0", "h1", "trainer@h2", network[3].address6, "nosuch") as futures:
        wait(futures, 20.0)
        names = [ask(future.result())["hostname"] for future in futures[:4]]
        assert names == ["h0", "h1", "h2", "h3"]
        assert "unknown host" in str(futures[4].exception())
    assert len(network.known_hosts.read_text().splitlines()) == 4
    assert [host.log.read_text().count("Accepted publickey for") for host in network.hosts] == [1, 1, 1, 1]
    assert "Accepted publickey for trainer" in network[2].log.read_text()


def test_through_another_host(hosts: Hosts, backend: str) -> None:
    network = hosts(2)
    address = hide(network, 1, 0)
    assert "unreachable" in outcome(network, backend, "h1")
    network.configure("h1", ProxyJump="h0")
    with network.known_hosts.open("a") as known:
        known.write(f"{address} {' '.join(network[1].public_key.split()[:2])}\n")
    assert outcome(network, backend, "h1", ssh_host_keys="strict") == ""
    assert "from 10.7.0.1" in network[1].log.read_text()


@pytest.mark.slow
def test_through_two_hosts(hosts: Hosts, backend: str) -> None:
    network = hosts(3)
    hide(network, 1, 0)
    hide(network, 2, 1)
    with network.known_hosts.open("a") as known:
        known.write(f"10.8.0.2 {' '.join(network[1].public_key.split()[:2])}\n")
    network.configure("h2", ProxyJump="trainer@h0:22,h1")
    assert outcome(network, backend, "h2") == ""
    assert "from 10.7.0.2" in network[2].log.read_text()
    network.configure("h2", ProxyJump="h1")
    network.configure("h1", ProxyJump="h0")
    assert outcome(network, backend, "h2") == ""


def test_a_failure_on_the_way_names_the_host_where_it_was(hosts: Hosts, backend: str) -> None:
    network = hosts(2)
    network.configure("h1", ProxyJump="h0")
    network.configure("h0", Port=77)
    assert "connection refused: nothing listens at 10.7.0.1 port 77" in outcome(network, backend, "h1")
    network.configure("h0", Port=22)
    network.configure("h1", HostName="10.9.0.9")
    assert "10.9.0.9 port 22" in outcome(network, backend, "h1")


def test_a_jump_for_all_hosts_is_none_for_itself(hosts: Hosts, backend: str) -> None:
    network = hosts(2)
    network.configure("*", ProxyJump="h0")
    if backend == "paramiko":
        assert outcome(network, backend, "h1") == ""
        network.configure("h0", ProxyJump="h1")
        assert "goes in a circle" in outcome(network, backend, "h1")
    network.configure("h0", ProxyJump="none")
    assert outcome(network, backend, "h1") == ""


def test_a_proxy_command(hosts: Hosts, backend: str) -> None:
    network = hosts(2)
    hide(network, 1, 0)
    network.configure("h1", ProxyCommand=f"ssh -F {network.config} -W {network[1].address}:%p h0")
    assert outcome(network, backend, "h1") == ""
    network.configure("h1", ProxyCommand="sh -c 'echo it is closed today >&2; exit 1'")
    text = outcome(network, backend, "h1")
    assert "it is closed today" in text and "ssh root@h1" in text, text


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/csh"])
def test_a_shell_that_prints_a_lot_first(hosts: Hosts, backend: str, shell: str) -> None:
    network = hosts(1)
    network[0].set_shell(shell)
    for name in (".bashrc", ".cshrc"):
        (network[0].home / name).write_text(
            f"{sys.executable} -c 'print(\"welcome \" * 7500)'\n"
            f"{sys.executable} -c 'import sys; sys.stderr.write(\"beware \" * 500000)'\n"
        )
    with launched(network, backend) as (future,):
        assert ask(future.result())["hostname"] == "h0"


def test_what_stands_in_the_home_folder_is_not_imported(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    for name in ("json", "socket", "dadt"):
        (network[0].home / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')\n")
    assert outcome(network, backend, python=sys.executable) == ""


def test_a_python_with_a_space_in_its_path(hosts: Hosts, backend: str, tmp_path: Path) -> None:
    network = hosts(1)
    python = tmp_path / "my python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for shell in ("/bin/bash", "/bin/csh"):
        network[0].set_shell(shell)
        assert outcome(network, backend, python=str(python)) == ""


def test_an_agent_ends_when_the_launcher_hangs_up(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    with launched(network, backend) as (future,):
        channel = future.result()
        ask(channel)
        channel.hang_up()
        await_that(lambda: not network.leftovers(), "the end of the agent", seconds=SETTLE_SECONDS)
        assert channel.end(5.0) == ""


def test_end_gives_an_agent_up_that_does_not_end(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    with launched(network, backend, python=sys.executable) as (future,):
        channel = future.result()
        ask(channel)
        (pid,) = (pid for pid, command in network[0].processes().items() if "dadt.launch.agent" in command)
        os.kill(pid, 19)
        assert channel.end(0.5) == "the agent has not ended in time; the connection to it was closed"
        os.kill(pid, 18)


ABANDON = """
import sys
sys.path[:0] = sys.argv[1:2]
from dadt.config import Config
from dadt.launch.hosts.host import Host
from dadt.launch.launchers.nearby import ssh_launcher
launcher = ssh_launcher(Config(ssh_config=sys.argv[2], ssh_backend=sys.argv[3], start_timeout=600.0))
futures = launcher.launch([Host(name="h0")] + [Host(name=f"10.7.0.{100 + n}") for n in range(40)])
futures[0].result(60)
launcher.close()
for future in futures:
    future.cancel()
"""


def test_attempts_that_hang_do_not_keep_the_process_from_ending(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network.configure("*", ConnectTimeout=600)
    command = [sys.executable, "-c", ABANDON, TESTS, network.config, backend]
    done = subprocess.run(network.launcher.enter(command), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_end_of_a_session_on_the_other_side(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    with launched(network, backend) as (future,):
        channel = future.result()
        ask(channel)
        for pid in network[0].sessions():
            os.kill(pid, 9)
        text = channel.end(5.0)
    assert text.startswith("the connection was lost ("), text


def test_the_configuration_is_read_without_openssh(
    hosts: Hosts, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = hosts(2)
    network.configure("h1", ProxyJump="h0", User="trainer")
    monkeypatch.setenv("PATH", str(tmp_path))
    text = outcome(network, backend, "h1", ssh_host_keys="strict")
    if backend == "openssh":
        assert text == "there is no ssh program on this machine -> install it, or --ssh-backend paramiko"
    else:
        assert text == ""
        assert "from 10.7.0.1" in network[1].log.read_text()


def test_a_configuration_that_is_not_understood(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network.config.write_text("Host h0\n  Nonsense yes\n")
    text = outcome(network, backend)
    assert text.startswith("the SSH configuration is not understood: ") and "-> check it with `ssh -G h0`" in text
    text = outcome(network, backend, ssh_config="/no/config")
    assert "/no/config" in text


def test_another_key_and_port(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network.forget()
    network[0].reload("Port 22\nPort 2222")
    new_key(network.folder / "other")
    network[0].keys.write_text((network.folder / "other.pub").read_text())
    assert outcome(network, backend, ssh_identity_file=str(network.folder / "other"), ssh_port=2222) == ""
    assert network.known_hosts.read_text().startswith("[10.7.0.1]:2222 ")
