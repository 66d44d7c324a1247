"""Key-value store of a job's processes: one process stores the values, the other ones query it.

Every client has proved itself: it either runs as the same user on the same host, according to the kernel, or knows the
connection's key.
"""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dadt.control.frame import Frame, Link
from dadt.control.schema import BLOB, KEY, FrameKind, Speaker, flag, listed, number, text, whole
from dadt.control.seal import Seal
from dadt.errors import DadtError, PeerLost

MOST_KEYS = 1 << 20
MOST_BYTES = 1 << 30
"""Maximum size of all stored values together, in bytes."""
UNSENT_LIMIT = BLOB + (1 << 20)
PLAIN = "plain"
"""Sent in place of an encryption state (Seal) for a connection that is a local socket and not encrypted."""
ASKS = Speaker(
    "a rank",
    {
        "set": FrameKind({"key": KEY}, BLOB),
        "get": FrameKind({"key": KEY}),
        "check": FrameKind({"keys": listed(KEY, 1 << 16)}),
        "compare_set": FrameKind({"key": KEY, "expected": text(), "desired": text()}),
        "add": FrameKind({"key": KEY, "amount": whole(-(1 << 40), 1 << 40)}),
    },
    header=64 << 20,
)
ANSWERS = Speaker(
    "rank 0",
    {"value": FrameKind({}, BLOB), "number": FrameKind({"number": number}), "truth": FrameKind({"truth": flag}),
     "error": FrameKind({"message": text()})},
)  # fmt: skip


class LocalValues:
    """The store itself, in the process that stores the values. Thread-safe. Raises DadtError if a value is too large or
    missing."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._put(key, value)

    def get(self, key: str) -> bytes:
        with self._lock:
            if key not in self._values:
                raise DadtError(f"there is no value {key!r}")
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        with self._lock:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set the value to `desired` if it equals `expected`; a missing value equals "". Returns the value
        afterwards."""
        with self._lock:
            if self._values.get(key, b"") == expected.encode():
                self._put(key, desired.encode())
            return self._values.get(key, b"").decode(errors="replace")

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a counter that starts at 0, and return the sum."""
        with self._lock:
            try:
                total = int(self._values.get(key, b"0")) + amount
            except ValueError:
                raise DadtError(f"{key!r} is no number") from None
            self._put(key, str(total).encode())
            return total

    def _put(self, key: str, value: bytes) -> None:
        grown = self._bytes + len(value) - len(self._values.get(key, b""))
        if len(value) > BLOB or grown > MOST_BYTES or (key not in self._values and len(self._values) >= MOST_KEYS):
            raise DadtError(f"{key!r}: {len(value):,} bytes are more than ranks may give to each other")
        self._values[key] = value
        self._bytes = grown


class Server:
    """Runs the store in a separate process. Rank 0 itself could not answer while a library blocks the interpreter, as
    MPI_Init does until all ranks have called it."""

    def __init__(self) -> None:
        """Start the store's process, which ends with this process or with `close`. Raises DadtError if it cannot be
        started."""
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dadt.comm.rendezvous.values", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal must interrupt the ranks only
                    cwd="/",  # python -m searches the current folder first, where the user may have modules
                )
            except OSError as error:
                self._line.close()
                raise DadtError(f"{sys.executable}: cannot be run ({error.strerror})") from error

    def admit(self, connection: socket.socket, seal: Seal | None) -> None:
        """Pass an authenticated connection to the store's process. May be called from any thread. seal: the
        connection's encryption; None for a local socket."""
        text = seal.to_text() if seal is not None else PLAIN
        with connection:
            socket.send_fds(self._line, [text.encode()], [connection.fileno()])

    def asked(self, timeout: float) -> RemoteValues:
        """Return this process's own client of the store. timeout: seconds to wait for each answer."""
        ours, theirs = socket.socketpair()
        self.admit(theirs, None)
        return RemoteValues(ours, None, timeout)

    def close(self) -> None:
        """End the store's process and wait for its end. May be called repeatedly."""
        self._line.close()
        self._process.wait()


class Service:
    """The store's process: one thread that answers all clients."""

    def __init__(self, line: socket.socket) -> None:
        """line: socket over which new clients' connections arrive; when it is closed, the process ends."""
        self._values = LocalValues()
        self._line = line
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ)
        self._over = False

    def run(self) -> None:
        while not self._over:
            for key, events in self._selector.select():
                self._admit() if key.fileobj is self._line else key.data(events)

    def _admit(self) -> None:
        text, descriptors, _, _ = socket.recv_fds(self._line, 4096, 1)
        if not text:
            self._over = True
            return
        connection = socket.socket(fileno=descriptors[0])
        seal = Seal.from_text(text.decode()) if text.decode() != PLAIN else None
        link = Link(connection.fileno(), connection.fileno(), ASKS, seal=seal)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._turn, connection, link))

    def _turn(self, connection: socket.socket, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for question in link.receive():
                    link.post(self._answer(question).encode())
                    if len(link.unsent) > UNSENT_LIMIT:
                        raise EOFError  # the client keeps asking without reading the answers
            link.flush()
        except (EOFError, BrokenPipeError, DadtError):
            self._selector.unregister(connection)
            connection.close()
            return
        waits = selectors.EVENT_WRITE if link.unsent else 0
        self._selector.modify(connection, selectors.EVENT_READ | waits, partial(self._turn, connection, link))

    def _answer(self, question: Frame) -> Frame:
        try:
            return QUESTIONS[question.kind](self._values, question)
        except (DadtError, ValueError) as error:  # ValueError is raised for example for a value that is not valid UTF-8
            return Frame("error", {"message": str(error)[:4096]})


def _set(values: LocalValues, question: Frame) -> Frame:
    values.set(question["key"], question.body)
    return Frame("truth", {"truth": True})


QUESTIONS: Mapping[str, Callable[[LocalValues, Frame], Frame]] = {
    "set": _set,
    "get": lambda values, asked: Frame("value", {}, values.get(asked["key"])),
    "check": lambda values, asked: Frame("truth", {"truth": values.check(asked["keys"])}),
    "compare_set": lambda values, asked: Frame(
        "value", {}, values.compare_set(asked["key"], asked["expected"], asked["desired"]).encode()
    ),
    "add": lambda values, asked: Frame("number", {"number": values.add(asked["key"], asked["amount"])}),
}


class RemoteValues:
    """A client of the store, with the same methods: each call sends a request to the store's process and waits for the
    answer. Raises PeerLost if that process has ended."""

    def __init__(self, connection: socket.socket, seal: Seal | None, timeout: float) -> None:
        """timeout: seconds to wait for each answer."""
        self._socket = connection
        self._link = Link(self._socket.fileno(), self._socket.fileno(), ANSWERS, seal=seal)
        self._timeout = timeout
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self._ask(Frame("set", {"key": key}, value))

    def get(self, key: str) -> bytes:
        return self._ask(Frame("get", {"key": key})).body

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Frame("check", {"keys": list(keys)}))["truth"])

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        header = {"key": key, "expected": expected, "desired": desired}
        return self._ask(Frame("compare_set", header)).body.decode()

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(Frame("add", {"key": key, "amount": amount}))["number"])

    def _ask(self, question: Frame) -> Frame:
        if len(question.body) > BLOB:
            raise DadtError(f"{question['key']!r}: {len(question.body):,} bytes are more than {BLOB:,}")
        with self._lock, selectors.DefaultSelector() as selector:
            if self._socket.fileno() < 0:
                raise PeerLost("rank 0, which holds what the ranks tell each other, did not answer before")
            selector.register(self._socket, selectors.EVENT_READ)
            try:
                self._link.send(question)
                while True:
                    waits = selectors.EVENT_WRITE if self._link.unsent else 0
                    selector.modify(self._socket, selectors.EVENT_READ | waits)
                    if not selector.select(self._timeout):
                        raise PeerLost(f"rank 0 did not answer within {self._timeout:g} s")
                    self._link.flush()
                    if answers := self._link.receive():
                        break
            except (BrokenPipeError, EOFError):
                raise PeerLost("rank 0, which holds what the ranks tell each other, is gone") from None
            except BaseException:
                self._socket.close()  # so that a late answer is not read as the answer to the next request
                raise
        if answers[0].kind == "error":
            raise DadtError(answers[0]["message"])
        return answers[0]


SharedValues = LocalValues | RemoteValues


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Service(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
