"""Each way in which SSH can fail has its own sentence, and says what to do."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dialogue import BACKENDS, ask, launched, outcome, read
from harness.machine import Machine, Network, new_key
from harness.patience import await_that

from dadt.control.frame import Frame

Hosts = Callable[[int], Network]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return str(request.param)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> Iterator[Callable[[Path], None]]:
    """agent(key) adds a key to the SSH agent."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    await_that(path.exists, "the SSH agent")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    yield lambda key: subprocess.run(["ssh-add", "-q", key], check=True)
    process.terminate()
    process.wait()


def test_a_name_without_address(hosts: Hosts, backend: str) -> None:
    text = outcome(hosts(1), backend, "nosuch")
    assert re.match(r"unknown host: nosuch has no address \(.+\) -> check the name", text), text


def test_a_port_at_which_nobody_listens(hosts: Hosts, backend: str) -> None:
    text = outcome(hosts(1), backend, ssh_port=77)
    assert text.startswith("connection refused: nothing listens at 10.7.0.1 port 77 -> is sshd running"), text


def test_a_host_that_does_not_answer(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network.configure("h0", ConnectTimeout=1)
    network.cut(network[0])
    assert outcome(network, backend).startswith("timeout: no answer from 10.7.0.1 port 22 within 1 s -> is it running")


def test_a_network_without_a_way(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network.configure("h0", HostName="10.9.0.1")
    assert outcome(network, backend).startswith("unreachable: 10.9.0.1 port 22 (Network is unreachable) -> ")


def test_a_changed_host_key_is_refused_with_both_fingerprints(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    known = network[0].fingerprint
    network[0].new_host_key()
    text = outcome(network, backend)
    assert f"has changed: it is ssh-ed25519 {network[0].fingerprint}, known is ssh-ed25519 {known}" in text
    assert f"{network.known_hosts}, line 1" in text and f"ssh-keygen -R '10.7.0.1' -f {network.known_hosts}" in text
    assert outcome(network, backend, ssh_host_keys="strict") == text
    before = network.known_hosts.read_text()
    assert outcome(network, backend, ssh_host_keys="off") == ""
    assert network.known_hosts.read_text() == before


def test_an_unknown_host_key_is_refused_where_that_is_asked_for(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network.forget()
    text = outcome(network, backend, ssh_host_keys="strict")
    assert f"is not known: it is ssh-ed25519 {network[0].fingerprint} -> " in text, text
    network.configure("h0", StrictHostKeyChecking="yes")
    assert outcome(network, backend) == text
    assert not network.known_hosts.exists()


def test_an_unknown_host_key_is_added_once(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network.forget()
    assert outcome(network, backend) == ""
    assert outcome(network, backend) == ""
    name, *key = network.known_hosts.read_text().split()
    assert name == "10.7.0.1" and key == network[0].public_key.split()[:2]
    assert outcome(network, backend, ssh_host_keys="strict") == ""


def test_a_known_key_of_another_kind_than_the_first(hosts: Hosts, backend: str) -> None:
    """The kinds that are known are asked for first."""
    network = hosts(1)
    path = network.folder / "ecdsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", path], check=True)
    network[0].reload(f"HostKey {path}")
    words = path.with_name("ecdsa.pub").read_text().split()
    network.known_hosts.write_text(f"10.7.0.1 {words[0]} {words[1]}\n")
    assert outcome(network, backend, ssh_host_keys="strict") == ""


def test_no_key_is_accepted(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network[0].keys.write_text("")
    text = outcome(network, backend)
    tried = f"permission denied: no accepted key (tried {network.identity}) -> ssh-copy-id root@h0, or -i FILE"
    assert text == tried


def test_the_agents_keys_are_counted(hosts: Hosts, agent: Callable[[Path], None], backend: str) -> None:
    network = hosts(1)
    network.configure("*", IdentitiesOnly="no")
    for name in ("one", "two"):
        new_key(network.folder / name)
        agent(network.folder / name)
    network[0].keys.write_text("")
    text = outcome(network, backend)
    assert f"no accepted key (tried {network.identity}, 2 agent keys) -> " in text, text
    network[0].keys.write_text((network.folder / "two.pub").read_text())
    assert outcome(network, backend) == ""


def test_a_key_with_a_passphrase_needs_the_agent(
    hosts: Hosts, agent: Callable[[Path], None], backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = hosts(1)
    key = network.folder / "locked"
    new_key(key, "secret")
    network[0].keys.write_text(key.with_name("locked.pub").read_text())
    text = outcome(network, backend, ssh_identity_file=str(key))
    assert f"{key} has a passphrase, and the agent does not hold it -> ssh-add {key}" in text, text
    script = tmp_path / "ask"
    script.write_text("#!/bin/sh\necho secret\n")
    script.chmod(0o755)
    monkeypatch.setenv("SSH_ASKPASS", str(script))
    monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")
    agent(key)
    monkeypatch.delenv("SSH_ASKPASS")
    assert outcome(network, backend, ssh_identity_file=str(key)) == ""


def test_an_identity_file_that_is_not_there(hosts: Hosts, backend: str) -> None:
    text = outcome(hosts(1), backend, ssh_identity_file="/no/key")
    assert text == "there is no private key /no/key -> give the right path with -i"


def test_too_many_keys(hosts: Hosts, agent: Callable[[Path], None], backend: str) -> None:
    network = hosts(1)
    network.configure("*", IdentitiesOnly="no")
    new_key(network.folder / "one")
    new_key(network.folder / "two")
    agent(network.folder / "one")
    agent(network.folder / "two")
    network[0].keys.write_text("")
    network[0].reload("MaxAuthTries 2")
    text = outcome(network, backend)
    assert "permission denied: too many keys" in text and text.endswith("-> name the right one with -i FILE"), text


def test_a_host_that_wants_a_password(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    text = "permission denied: it asks for password, not only for a key -> --ssh-backend openssh"
    network[0].reload("PasswordAuthentication yes\nPubkeyAuthentication no")
    assert outcome(network, backend).startswith(text)
    network[0].reload("PasswordAuthentication yes\nAuthenticationMethods publickey,password")
    assert outcome(network, backend).startswith(text)


def test_an_sshd_that_is_full_is_tried_twice(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network[0].reload("MaxStartups 1")
    with network.launcher.entered(), socket.create_connection((network[0].address, 22)) as other:
        other.recv(100)
        text = outcome(network, backend)
    assert text.startswith("10.7.0.1 port 22 closed the connection before it let anybody log in"), text
    assert network[0].log.read_text().count("drop connection") == 2


@pytest.mark.slow
def test_an_sshd_that_is_full_for_a_moment_is_no_failure(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network[0].reload("MaxStartups 1")
    with network.launcher.entered():
        other = socket.create_connection((network[0].address, 22))
        other.recv(100)

    def leave() -> None:
        await_that(lambda: "drop connection" in network[0].log.read_text(), "the first attempt")
        other.close()

    thread = threading.Thread(target=leave)
    thread.start()
    text = outcome(network, backend)
    thread.join()
    assert text == ""


SERVER = """
import socket
server = socket.create_server(("", 80))
print(flush=True)
while True:
    server.accept()[0].sendall(b"HTTP/1.0 400 Bad Request\\r\\n\\r\\n" * 9999)
"""


def test_another_server_at_the_port(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    command = network[0].enter([sys.executable, "-c", SERVER])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        text = outcome(network, backend, ssh_port=80)
        for pid in network[0].processes():
            os.kill(pid, 9)
    assert text.startswith("what answers at 10.7.0.1 port 80 is no SSH server ("), text


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/csh"])
def test_no_python(hosts: Hosts, backend: str, shell: str) -> None:
    network = hosts(1)
    network[0].set_shell(shell)
    text = outcome(network, backend, python="/no/such/python")
    assert text == "there is no /no/such/python -> give --python PATH, a path that is right on all hosts"
    text = outcome(network, backend, python="nosuchpython")
    assert text == "there is no nosuchpython -> give --python PATH, a path that is right on all hosts"


def test_a_python_without_dadt(hosts: Hosts, backend: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    text = outcome(hosts(1), backend, python=str(python))
    assert text == f"{python} there has no dadt -> install it there, or give --python PATH"


def test_a_python_that_cannot_be_run(hosts: Hosts, backend: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("text")
    text = outcome(hosts(1), backend, python=str(tmp_path / "python"))
    assert text.startswith(f"{tmp_path}/python cannot be run there (") and text.endswith("-> give --python PATH"), text


def test_a_user_who_may_not_have_a_shell(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    network[0].set_shell("/usr/sbin/nologin")
    text = outcome(network, backend)
    assert text == "the agent exited with code 1; its last words: This account is currently not available."


def agents(machine: Machine) -> list[int]:
    return [pid for pid, command in machine.processes().items() if "-m dadt.launch.agent" in command]


def test_an_agent_that_is_killed(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    with launched(network, backend, python=sys.executable) as (future,):
        channel = future.result(20.0)
        ask(channel)
        (pid,) = agents(network[0])
        os.kill(pid, 9)
        with pytest.raises(EOFError):
            read(channel, "end")
        assert channel.end(5.0) == "the agent was killed by a signal"
        assert channel.end(5.0) == "the agent was killed by a signal"
    folder = network[0].path("/tmp/dadt-0/test.0")
    await_that(lambda: not folder.exists(), "the guard")


@pytest.mark.sample(1)
def test_a_cut_network(hosts: Hosts, backend: str) -> None:
    network = hosts(1)
    with launched(network, backend, orphan_timeout=3.0) as (future,):
        channel = future.result(20.0)
        ask(channel)
        network.cut(network[0])
        channel.link.send(Frame("beat"))
        with pytest.raises(EOFError):
            read(channel, "end", 15.0)
        assert channel.end(5.0).startswith("the connection was lost (")
    network.heal(network[0])
