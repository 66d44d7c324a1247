"""Which address others reach: a crowd that asks at once, and callers that hang up."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from harness.patience import PATIENCE, await_that

from dadt.control import network
from dadt.control.accept import MOST_AT_ONCE
from dadt.control.frame import Frame
from dadt.control.network import Probe, ProbeListener
from dadt.launch.launchers.local import LocalChannel

TOKEN = b"t" * network.TOKEN_BYTES


@pytest.fixture
def listener():
    listener = ProbeListener(TOKEN)
    yield listener
    listener.close()


def call(listener: ProbeListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE)


def test_a_caller_that_hangs_up_is_no_matter(listener):
    with call(listener) as caller:
        # Closed with a reset, as port scanners do.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with call(listener) as caller:
        listener.answer()
        assert caller.recv(network.TOKEN_BYTES) == TOKEN


def test_many_may_call_at_once(listener):
    """All are in the queue before anyone is answered; one that found it full would have to try again."""
    callers = [call(listener) for _ in range(300)]
    assert not any(map(retransmissions, callers))
    for _ in range(300 // MOST_AT_ONCE + 1):
        listener.answer()
    assert all(caller.recv(network.TOKEN_BYTES) == TOKEN for caller in callers)
    for caller in callers:
        caller.close()


def retransmissions(connection: socket.socket) -> int:
    """The field tcpi_total_retrans of Linux's tcp_info."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("I", info, 100)[0])


@pytest.mark.parametrize(("hosts", "found"), [(1, False), (network.CROWD + 1, True)])
def test_only_a_crowd_is_given_the_time_to_try_again(monkeypatch, hosts, found):
    """One of the two addresses of each host answers only after a while."""
    now = 0.0
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now))
    with (
        socket.create_server(("127.0.0.1", 0)) as quick,
        socket.create_server(("127.0.0.2", quick.getsockname()[1])) as slow,
    ):
        quick.setblocking(False)
        slow.setblocking(False)
        addresses = ["127.0.0.1", "127.0.0.2"]
        port = quick.getsockname()[1]
        probe = Probe(
            [{"index": index, "port": port, "token": TOKEN.hex(), "addresses": addresses} for index in range(hosts)]
        )
        probe.start()
        while not probe.finished:
            answer(quick)
            if now > 0.6:
                answer(slow)
            probe.advance()
            now += 0.05
        probe.close()
    assert all(("127.0.0.2" in reached) is found for reached in probe.reached.values())


def answer(server: socket.socket) -> None:
    while select.select([server], [], [], 0.01)[0]:
        with server.accept()[0] as connection:
            connection.send(TOKEN)


PATIENT = f"""#!{sys.executable}
import runpy
from dadt.launch.agent import agent
agent.ADDRESS_SECONDS = {PATIENCE}
runpy.run_module("dadt.launch.agent", run_name="__main__", alter_sys=True)
"""
"""A Python whose agent waits for an address until the test has made one."""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")
def test_a_host_may_get_its_address_while_the_job_starts(tmp_path):
    python = tmp_path / "python"
    python.write_text(PATIENT)
    python.chmod(0o755)
    channel = LocalChannel(str(python), ["unshare", "--net"])
    frames: list[Frame] = []
    look = {
        "job": "late",
        "index": 0,
        "hosts": 2,
        "cwd": "/",
        "files": [],
        "prologue": "",
        "mpi": "",
        "orphan_timeout": 30.0,
    }

    def came() -> bool:
        if select.select([channel.link.reader], [], [], 0)[0]:
            frames.extend(channel.link.receive())
        return bool(frames)

    def heard() -> Frame:
        await_that(came, "a frame of the agent")
        return frames.pop(0)

    def ip(*words: str) -> None:
        subprocess.run(["nsenter", "--net", "-t", str(channel._process.pid), "ip", *words], check=True)

    try:
        channel.link.send(Frame("look", {**look, "orphan_timeout": 30.0, "env": {}}))
        assert heard().kind == "beat"  # and not yet "ready"
        ip("link", "add", "late0", "type", "veth", "peer", "name", "late1")
        ip("link", "set", "late0", "up")  # its peer is not: there is no carrier yet
        ip("addr", "add", "10.77.0.1/24", "dev", "late0")
        while (ready := heard()).kind == "beat":
            pass
        assert ready.kind == "ready"
        assert [(each["interface"], each["address"]) for each in ready["addresses"]] == [("late0", "10.77.0.1")]
    finally:
        channel.end(20.0)
