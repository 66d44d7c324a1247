"""What ranks without an agent tell each other through rank 0, over sockets of one host and over sealed connections."""

from __future__ import annotations

import ctypes
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from harness.patience import PATIENCE

from dadt.comm.rendezvous.values import LocalValues, RemoteValues, Server
from dadt.control.connection import Listener, dial
from dadt.control.frame import LENGTHS, Frame
from dadt.errors import DadtError, PeerLost

Ask = Callable[[], RemoteValues]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(params=["a socket of this host", "a sealed connection"])
def ask(request: pytest.FixtureRequest, server: Server) -> Iterator[Ask]:
    if request.param == "a socket of this host":

        def ask() -> RemoteValues:
            ours, theirs = socket.socketpair()
            server.admit(ours, None)
            return RemoteValues(theirs, None, 5.0)

        yield ask
        return
    key = b"k" * 32
    listener = Listener(key, 5.0, lambda hello: {}, lambda hello, connection: server.admit(*connection))
    reach = replace(listener.reach(), addresses=["127.0.0.1"])

    def ask() -> RemoteValues:
        connection, _, _ = dial(lambda: reach, {}, time.monotonic() + PATIENCE)
        return RemoteValues(connection.socket, connection.seal, 5.0)

    yield ask
    listener.close()


def test_each_sees_what_the_others_tell(server: Server, ask: Ask) -> None:
    one, other, held = ask(), ask(), server.asked(5.0)
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


def test_what_is_too_large_is_refused_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dadt.comm.rendezvous.values.MOST_BYTES", 1000)
    asked = LocalValues()
    with pytest.raises(DadtError, match="'a': 2,000 bytes are more than ranks may give"):
        asked.set("a", b"x" * 2000)
    asked.set("a", b"x" * 900)
    asked.set("a", b"y" * 950)
    assert asked.get("a") == b"y" * 950


ASKER = """
import socket, sys
from dadt.comm.rendezvous.values import RemoteValues
asked = RemoteValues(socket.socket(fileno=int(sys.argv[1])), None, 9.0)
asked.set("a", b"b")
print("answered", flush=True)
"""
HOSTILE = {
    "no frame": b"\xff" * 100,
    "a command of another kind": Frame("kill").encode(),
    "a gigabyte announced": LENGTHS.pack(len(b'{"kind": "set", "key": "a"}'), 1 << 30) + b'{"kind": "set", "key": "a"}',
    "keys without an end": Frame("check", {"keys": ["x" * 2000]}).encode(),
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_whoever_says_something_else_is_hung_up_on_and_nobody_else(server: Server, said: bytes) -> None:
    ours, theirs = socket.socketpair()
    other, asks = socket.socketpair()
    server.admit(ours, None)
    server.admit(other, None)
    theirs.sendall(said)
    theirs.settimeout(PATIENCE)
    assert theirs.recv(1) == b""
    RemoteValues(asks, None, 5.0).set("a", b"b")
    assert server.asked(5.0).get("a") == b"b"


def test_who_asks_without_reading_is_hung_up_on(server: Server) -> None:
    server.asked(5.0).set("a", b"x" * (32 << 20))
    ours, theirs = socket.socketpair()
    server.admit(ours, None)
    theirs.sendall(Frame("get", {"key": "a"}).encode() * 8)

    theirs.settimeout(PATIENCE)
    received = 0
    while data := theirs.recv(1 << 20):
        received += len(data)
    assert received < 4 * (32 << 20)
    theirs.close()


def test_letters_that_are_none_end_nothing(server: Server) -> None:
    ours, theirs = socket.socketpair()
    server.admit(ours, None)
    asked = RemoteValues(theirs, None, 5.0)
    with pytest.raises(DadtError, match="surrogates"):
        asked.compare_set("a", "\ud800", "x")
    assert not asked.check(["a"])


def test_a_rank_in_a_library_that_locks_the_interpreter_answers_all_the_same(server: Server) -> None:
    """As MPI_Init does until all ranks are in it, which first ask rank 0."""
    ours, theirs = socket.socketpair()
    server.admit(ours, None)
    said = ctypes.create_string_buffer(8)
    with subprocess.Popen(
        [sys.executable, "-c", ASKER, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
    ) as asker:
        assert asker.stdout is not None
        # Reads until something is said or the asker has given up, and does not let go of the lock.
        ctypes.PyDLL(None).read(asker.stdout.fileno(), said, len(said))
    assert said.raw == b"answered"
    theirs.close()


def test_the_end_of_rank_0_is_told() -> None:
    ours, theirs = socket.socketpair()
    asked = RemoteValues(theirs, None, 5.0)
    ours.close()
    with pytest.raises(PeerLost, match="rank 0, which holds what the ranks tell each other, is gone"):
        asked.get("a")


def test_a_rank_0_that_does_not_answer_is_not_awaited_for_ever() -> None:
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(PeerLost, match=r"did not answer within 0\.2 s"):
        RemoteValues(theirs, None, 0.2).check(["a"])
