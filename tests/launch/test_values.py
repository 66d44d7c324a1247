"""What ranks without an agent tell each other through rank 0, over sockets of one host and over sealed connections."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from run import await_that

from dadt.errors import DadtError, PeerLost
from dadt.launch.frame import LENGTHS, Frame
from dadt.launch.listen import Listener, dial
from dadt.launch.values import Asked, Held, Server

Ask = Callable[[], Asked]


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture(params=["a socket of this host", "a sealed connection"])
def ask(request: pytest.FixtureRequest, held: Held) -> Iterator[Ask]:
    server = Server(held)
    if request.param == "a socket of this host":

        def ask() -> Asked:
            ours, theirs = socket.socketpair()
            server.admit(ours, None)
            return Asked(theirs, None, 5.0)

        yield ask
        return
    key = b"k" * 32
    listener = Listener(key, 5.0, lambda hello: {}, lambda hello, connection: server.admit(*connection))
    reach = replace(listener.reach(), addresses=["127.0.0.1"])

    def ask() -> Asked:
        connection, _, _ = dial(lambda: reach, {}, time.monotonic() + 5.0)
        return Asked(connection.socket, connection.seal, 5.0)

    yield ask
    listener.close()


def test_each_sees_what_the_others_tell(held: Held, ask: Ask) -> None:
    one, other = ask(), ask()
    one.set("a", b"\0" * 300_000)
    assert other.get("a") == held.get("a") == b"\0" * 300_000
    assert other.check(["a"]) and not other.check(["a", "b"])
    assert [each.compare_set("claim", "", name) for each, name in ((one, "1"), (other, "2"))] == ["1", "1"]
    assert [each.add("count", 2) for each in (one, other, held)] == [2, 4, 6]
    with pytest.raises(DadtError, match="there is no value 'b'"):
        one.get("b")


def test_many_ask_at_once(ask: Ask) -> None:
    told: queue.Queue[int] = queue.Queue()

    def count() -> None:
        asked = ask()
        for _ in range(50):
            told.put(asked.add("count", 1))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told.queue) == list(range(1, 401))


def test_what_is_too_large_is_refused_and_nothing_else(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dadt.launch.values.MOST_BYTES", 1000)
    asked = ask()
    with pytest.raises(DadtError, match="'a': 2,000 bytes are more than ranks may give"):
        asked.set("a", b"x" * 2000)
    asked.set("a", b"x" * 900)
    asked.set("a", b"y" * 950)
    assert asked.get("a") == b"y" * 950


HOSTILE = {
    "no frame": b"\xff" * 100,
    "a command of another kind": Frame("kill").encode(),
    "a gigabyte announced": LENGTHS.pack(len(b'{"kind": "set", "key": "a"}'), 1 << 30) + b'{"kind": "set", "key": "a"}',
    "keys without an end": Frame("check", {"keys": ["x" * 2000]}).encode(),
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_whoever_says_something_else_is_hung_up_on_and_nobody_else(held: Held, said: bytes) -> None:
    server = Server(held)
    ours, theirs = socket.socketpair()
    other, asks = socket.socketpair()
    server.admit(ours, None)
    server.admit(other, None)
    theirs.sendall(said)
    theirs.settimeout(5.0)
    assert theirs.recv(1) == b""
    Asked(asks, None, 5.0).set("a", b"b")
    assert held.get("a") == b"b"


def test_who_asks_without_reading_is_hung_up_on(held: Held) -> None:
    server = Server(held)
    held.set("a", b"x" * (32 << 20))
    ours, theirs = socket.socketpair()
    server.admit(ours, None)
    theirs.sendall(Frame("get", {"key": "a"}).encode() * 8)

    await_that(lambda: ours.fileno() == -1, "the end of the connection")
    theirs.close()


def test_the_end_of_rank_0_is_told() -> None:
    ours, theirs = socket.socketpair()
    asked = Asked(theirs, None, 5.0)
    ours.close()
    with pytest.raises(PeerLost, match="rank 0, which holds what the ranks tell each other, is gone"):
        asked.get("a")


def test_a_rank_0_that_does_not_answer_is_not_awaited_for_ever() -> None:
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(PeerLost, match=r"did not answer within 0\.2 s"):
        Asked(theirs, None, 0.2).check(["a"])
