"""`dadt run` over simulated machines, for what SSH and the shells there may do to it."""

from __future__ import annotations

import random
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from dialogue import BACKENDS
from harness.host_run import HostRun
from harness.machine import Network
from harness.patience import SETTLE_SECONDS, await_that
from harness.run import Result

Launch = Callable[..., Result]
WHERE = """
import os, socket
print(os.environ["DADT_RANK"], socket.gethostname())
"""
BYTES = """
import os, random, sys, threading
rank = int(os.environ["DADT_RANK"])
def write(stream, data):
    stream.buffer.write(data)
    stream.flush()
data = random.Random(rank).randbytes(5 << 20)
low, high = (data.translate(bytes(byte % 128 + more for byte in range(256))) for more in (0, 128))
threads = [threading.Thread(target=write, args=pair) for pair in ((sys.stdout, low), (sys.stderr, high))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def launch(start: Callable[..., HostRun], backend: str) -> Launch:
    """launch(network, script, *arguments) -> Result, by this backend."""
    return lambda network, script, *arguments: start(
        network, script, "-H", network.list(2), "--ssh-backend", backend, *arguments, "train.py"
    ).finish()


def places(result: Result) -> list[bytes]:
    assert result.code == 0, result.err
    return sorted(line.rpartition(b"] ")[2] for line in result.out.splitlines())


@pytest.mark.sample(3)  # test_ssh.py has all four for an agent alone
@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/csh"])
def test_shells_that_print_at_their_start(hosts: Callable[[int], Network], launch: Launch, shell: str) -> None:
    network = hosts(2)
    for host in network.hosts:
        host.set_shell(shell)
        for name in (".bashrc", ".cshrc"):
            noise = f'{sys.executable} -c \'import sys; print("hello " * 5000); sys.stderr.write("hear " * 50000)\''
            (host.home / name).write_text(noise + "\n")
    result = launch(network, WHERE)
    assert places(result) == [b"0 h0", b"1 h0", b"2 h1", b"3 h1"]
    assert "hello" not in result.err and "hear" not in result.err


def test_a_host_behind_another(hosts: Callable[[int], Network], launch: Launch) -> None:
    network = hosts(2)
    network.configure("h1", ProxyJump="h0")
    assert places(launch(network, WHERE)) == [b"0 h0", b"1 h0", b"2 h1", b"3 h1"]
    assert f"from {network[0].address}" in network[1].log.read_text()


def test_ten_megabytes_of_anything_on_both_streams(hosts: Callable[[int], Network], launch: Launch) -> None:
    network = hosts(2)
    result = launch(network, BYTES, "-np", "2", "--output", "errors")
    assert result.code == 0, result.err
    for rank in range(2):
        log = result.log(rank)  # the streams are told apart by their eighth bit
        data = random.Random(rank).randbytes(5 << 20)
        low, high = (data.translate(bytes(byte % 128 + more for byte in range(256))) for more in (0, 128))
        assert log.translate(None, bytes(range(128, 256))) == low
        assert log.translate(None, bytes(range(128))) == high


def test_all_hosts_that_failed_are_told_each_in_a_line(hosts: Callable[[int], Network], launch: Launch) -> None:
    network = hosts(5)
    network[4].reload("MaxStartups 1")
    with network.launcher.entered():
        other = socket.create_connection((network[4].address, 22))
    other.recv(100)
    known = network[1].fingerprint
    network[1].new_host_key()
    network.configure("h2", Port=77)
    network.configure("h3", User="nobody")
    result = launch(network, WHERE)
    other.close()
    assert result.code == 3
    lines = sorted(line for line in result.err.splitlines() if line.startswith("dadt: h"))
    assert len(lines) == 4
    assert known in lines[0] and network[1].fingerprint in lines[0]
    assert "connection refused" in lines[1]
    assert "permission denied" in lines[2] and lines[2].endswith("ssh-copy-id nobody@h3, or -i FILE")
    assert "closed the connection before it let anybody log in" in lines[3]
    assert result.err.splitlines()[-1] == "dadt: nothing was started; exit code 3"
    assert "Traceback" not in result.err and result.out == b""


def test_a_host_key_that_was_added_is_told(hosts: Callable[[int], Network], launch: Launch) -> None:
    network = hosts(1)
    network.forget()
    result = launch(network, WHERE)
    assert f"h0: its host key was not known (ssh-ed25519 {network[0].fingerprint}): added to " in result.err
    assert "host key" not in launch(network, WHERE).err


def test_a_launcher_that_is_killed_leaves_nothing(
    hosts: Callable[[int], Network], start: Callable[..., HostRun], backend: str, tmp_path: Path
) -> None:
    network = hosts(2)
    script = "import os, time; open('ready' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(600)"
    run = start(network, script, "-np", "2", "-H", network.list(1), "--ssh-backend", backend, "train.py")
    run.wait_for("ready0", "ready1")
    run.process.kill()
    await_that(lambda: not network.leftovers(), f"the end of {network.leftovers()}", seconds=SETTLE_SECONDS)
    await_that(
        lambda: not clients_of(network), f"the end of the SSH clients {clients_of(network)}", seconds=SETTLE_SECONDS
    )


def clients_of(network: Network) -> list[int]:
    """Processes of this machine that were started with the network's SSH configuration, by number."""
    config = str(network.config)
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(config in word for word in p.info["cmdline"] or ())]


@pytest.mark.alone
def test_a_dry_run_shows_the_command_and_connects_to_nobody(hosts: Callable[[int], Network], launch: Launch) -> None:
    network = hosts(1)
    result = launch(network, WHERE, "--dry-run")
    assert result.code == 0, result.err
    # The Python of the `dadt` that is called, which may have another name in the same environment.
    command = (
        rf"ssh -F {network.config} h0 'cd /; exec {Path(sys.executable).parent}/python[\d.]* -u -m dadt\.launch\.agent'"
    )
    assert re.search(command, result.out.decode()), result.out
    assert "Connection from" not in network[0].log.read_text()
