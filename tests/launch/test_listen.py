"""Agents that connect back: who gets in, who does not, and how long anybody waits."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from harness.patience import PATIENCE, await_that

from dadt.control import connection as listen
from dadt.control import schema
from dadt.control.connection import (
    GREETING,
    Listener,
    Reach,
    Refused,
    SealedConnection,
    Unreached,
    Words,
    dial,
)
from dadt.control.frame import MAGIC, Frame, Link
from dadt.launch.launchers.connect_back import SocketChannel

KEY = b"k" * 32


class Door:
    """A listener, and who came in."""

    def __init__(self) -> None:
        self.came: queue.Queue[tuple[Words, SealedConnection]] = queue.Queue()
        self.turned_away: queue.Queue[str] = queue.Queue()
        self.listener = Listener(
            KEY,
            5.0,
            self.greet,
            lambda hello, connection: self.came.put((hello, connection)),
            turned_away=self.turned_away.put,
        )
        self.reach = replace(self.listener.reach(), addresses=["127.0.0.1"])

    def greet(self, hello: Words) -> Words:
        return {"refused": "nobody is wanted"} if hello.get("name") == "nobody" else {"hello": hello["name"]}

    def dial(self, seconds: float = PATIENCE, **changes: object) -> tuple[SealedConnection, Words, str]:
        return dial(lambda: replace(self.reach, **changes), {"name": "n1"}, time.monotonic() + seconds)

    def knock(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.listener.port), 5.0)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.listener.close()
    while not door.came.empty():
        door.came.get()[1].socket.close()


def test_frames_go_both_ways_over_the_connection(door: Door) -> None:
    theirs, answer, at = door.dial()
    hello, ours = door.came.get(timeout=PATIENCE)
    assert (hello, answer) == ({"name": "n1"}, {"hello": "n1"})
    assert at == f"127.0.0.1:{door.listener.port}"
    channel = SocketChannel(ours)
    with theirs.socket:
        agent = Link(theirs.socket.fileno(), theirs.socket.fileno(), schema.LAUNCHER, seal=theirs.seal)
        agent.post(b"noise" + MAGIC)
        agent.send(Frame("end", {"stuck": [], "signal": 3}))
        frames: list[Frame] = []
        await_that(lambda: frames or frames.extend(channel.link.receive()), "a frame")
        assert frames[0]["signal"] == 3
        channel.link.send(Frame("signal", {"number": 10}))
        frames.clear()
        await_that(lambda: frames or frames.extend(agent.receive()), "a frame")
        assert frames[0]["number"] == 10
        channel.hang_up()
        with pytest.raises(EOFError):
            await_that(agent.receive, "the end")
    assert channel.end(5.0) == ""


def test_end_waits_for_the_agent_and_no_longer_than_it_may(door: Door) -> None:
    theirs, _, _ = door.dial()
    channel = SocketChannel(door.came.get(timeout=PATIENCE)[1], lambda seconds: "it sleeps")
    channel.hang_up()
    begin = time.monotonic()
    assert channel.end(0.3) == "it sleeps"
    assert time.monotonic() - begin > 0.2
    assert channel.end(9.0) == "it sleeps"
    theirs.socket.close()


def test_an_agent_that_is_lost_is_explained(door: Door) -> None:
    theirs, _, _ = door.dial()
    channel = SocketChannel(door.came.get(timeout=PATIENCE)[1], lambda seconds: "it was killed")
    theirs.socket.close()
    with pytest.raises(EOFError):
        await_that(channel.link.receive, "the end")
    assert channel.end(2.0) == "it was killed"


def test_who_is_not_wanted_hears_why_at_once(door: Door) -> None:
    tries: list[Reach] = []

    def find() -> Reach:
        tries.append(door.reach)
        return door.reach

    with pytest.raises(Refused, match="nobody is wanted"):
        dial(find, {"name": "nobody"}, time.monotonic() + PATIENCE)
    assert len(tries) == 1 and door.came.empty()


def test_another_key_does_not_get_in_and_is_told(door: Door) -> None:
    with pytest.raises(Unreached, match="has another key"):
        door.dial(0.5, key=b"other")
    assert door.came.empty()


def test_another_key_is_told_of_a_launcher_that_has_ended_since(door: Door) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        wrong = replace(door.reach, key=b"other")
        reaches = iter([wrong, replace(wrong, port=closed.getsockname()[1])])
        told = r"Connection refused\); before, the launcher was not reached at .*the launcher there has another key\)"
        with pytest.raises(Unreached, match=told):
            dial(lambda: next(reaches), {"name": "n1"}, time.monotonic() + PATIENCE, listens=True)


def test_a_launcher_that_does_not_know_the_key_is_not_believed() -> None:
    """Whoever took the port of a launcher that is gone gets no agent, and no proof to use elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        reach = Reach(addresses=["127.0.0.1"], port=impostor.getsockname()[1], key=KEY, silence=5.0)

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(GREETING + b"n" * 32)
                connection.sendall(connection.recv(4096)[-32:])  # the agent's own proof, given back

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unreached, match="another key"):
            dial(lambda: reach, {}, time.monotonic() + 0.1)
        thread.join()


STRANGERS: list[Callable[[socket.socket], object]] = [
    lambda stranger: None,
    lambda stranger: stranger.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 10),
    lambda stranger: stranger.sendall(b"\xff" * 100_000),
    lambda stranger: stranger.sendall(b"n" * 32 + b"p" * 32),
    lambda stranger: stranger.sendall(b"half"),
]


@pytest.mark.parametrize("says", STRANGERS, ids=["nothing", "http", "much", "a-wrong-proof", "half"])
def test_strangers_are_dropped_and_disturb_nobody(
    door: Door, says: Callable[[socket.socket], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "MEET_SECONDS", 0.5)
    with door.knock() as stranger, door.knock():
        try:
            says(stranger)
        except OSError:
            pass  # dropped before it had said all
        theirs, _, _ = door.dial()
        theirs.socket.close()
        stranger.settimeout(PATIENCE)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass
    door.came.get(timeout=PATIENCE)[1].socket.close()


def test_the_addresses_are_tried_in_turn(door: Door) -> None:
    theirs, _, at = door.dial(addresses=["no.such.host.invalid", "127.0.0.2", "127.0.0.1"])
    theirs.socket.close()
    assert at.startswith("127.0.0.")


def test_who_is_early_waits(door: Door) -> None:
    seen: list[int] = []

    def find() -> Reach:
        seen.append(1)
        if len(seen) < 3:
            raise Unreached("there is nothing yet")
        return door.reach

    theirs, _, _ = dial(find, {"name": "n1"}, time.monotonic() + PATIENCE)
    theirs.socket.close()
    assert len(seen) == 3


def test_who_waits_in_vain_says_where_and_why() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else can listen there meanwhile
        port = closed.getsockname()[1]
        reach = Reach(addresses=["127.0.0.1", "::1"], port=port, key=KEY, silence=5.0)
        with pytest.raises(Unreached) as caught:
            dial(lambda: reach, {}, time.monotonic() + 0.3)
    assert f"127.0.0.1:{port} (Connection refused)" in str(caught.value)
    assert f"[::1]:{port}" in str(caught.value)


def test_both_sides_notice_a_silent_end(door: Door) -> None:
    theirs, _, _ = door.dial()
    ours = door.came.get(timeout=PATIENCE)[1]
    for end in (ours.socket, theirs.socket):
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)  # it counts a slow reader as silent
        assert not os.get_inheritable(end.fileno())
        end.close()


def test_a_reach_survives_being_written_down() -> None:
    reach = Reach(addresses=["10.0.0.1", "fd00::1"], port=4000, key=KEY, silence=30.0)
    assert Reach.from_text(reach.to_text()) == reach
    for text in ("", "[]", "{}", '{"port": 1}', "no json"):
        with pytest.raises(ValueError):
            Reach.from_text(text)


def test_a_flood_keeps_nobody_out_and_is_told_once(door: Door) -> None:
    """Of connections that say nothing, from another address than the agent's: they take no more threads and
    descriptors than so many, and whoever knows the key comes in meanwhile."""
    flood = []
    try:
        for _ in range(300):
            stranger = socket.create_connection(("127.0.0.1", door.listener.port), 5.0, ("127.0.0.9", 0))
            flood.append(stranger)
        theirs, _, _ = dial(lambda: door.reach, {"name": "n1"}, time.monotonic() + PATIENCE)
        theirs.socket.close()
        door.came.get(timeout=PATIENCE)[1].socket.close()
        # The newest is the last one taken: when it has been greeted, the others are in their places.
        flood[-1].settimeout(PATIENCE)
        assert flood[-1].recv(4096).startswith(GREETING)
        await_that(lambda: threading.active_count() < 64 + 20, "the threads of those that were dropped")
    finally:
        for stranger in flood:
            stranger.close()


def test_a_stranger_is_told_of_once(door: Door) -> None:
    for _ in range(3):
        with door.knock() as stranger:
            stranger.sendall(b"n" * 32 + b"p" * 32)
            stranger.settimeout(PATIENCE)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    text = door.turned_away.get(timeout=PATIENCE)
    assert text == "a connection from 127.0.0.1 was turned away: it has another key"
    assert door.turned_away.empty()


FEW_DESCRIPTORS = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from dadt.control.connection import Listener, dial
came = []
listener = Listener(b"k" * 32, 5.0, lambda hello: {}, lambda hello, connection: came.append(connection))
print(listener.port, flush=True)
sys.stdin.readline()  # the flood is over
reach = listener.reach()
sys.stdin.readline()  # the agent was there twice, and may be taken a moment after it has heard so
while len(came) < 2:
    time.sleep(0.01)
print(len(came), flush=True)
"""


def test_a_listener_without_descriptors_goes_on_when_there_are_some_again() -> None:
    """Each process may have 64 here: accept fails with EMFILE, and must not end what accepts."""
    with subprocess.Popen(
        [sys.executable, "-c", FEW_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        flood = [socket.create_connection(("127.0.0.1", port), 5.0) for _ in range(200)]
        reach = Reach(addresses=["127.0.0.1"], port=port, key=KEY, silence=5.0)
        theirs, _, _ = dial(lambda: reach, {}, time.monotonic() + PATIENCE)
        for stranger in flood:
            stranger.close()
        print(file=process.stdin, flush=True)
        again, _, _ = dial(lambda: reach, {}, time.monotonic() + PATIENCE)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "2\n"
        theirs.socket.close()
        again.socket.close()
