"""Lets other dadt commands of the same user query a running job. Contains the launcher's socket for these commands, and
the commands' end of the connection."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dadt.control import schema
from dadt.control.accept import Entrance, connect_to, listen_at, peer_of
from dadt.control.frame import CHUNK, Frame, Link, Parser
from dadt.control.job_folder import Folder
from dadt.errors import DadtError, LaunchError

if TYPE_CHECKING:
    from dadt.launch.monitor.host_links import HostLinks
    from dadt.launch.monitor.watch import Gauge

BACKLOG = 16
WRITE_SECONDS = 0.05
STACKS_SECONDS = 4.0
"""Seconds that agents have to answer a request for stack traces. It is longer than the time for which agents wait for
their workers."""
ANSWER_SECONDS = 3.0
MOST_CALLERS = 256
LOOK_SECONDS = 1.0
UNSENT_LIMIT = 4 << 20
"""Number of bytes of answers that a caller may leave unread. If more are unread when the caller asks another question,
it is disconnected."""


@dataclass(eq=False, slots=True)
class Caller:
    """A connection from another dadt command. It stays open until the command disconnects or the job ends, so a command
    can use it to wait for the end."""

    socket: socket.socket
    link: Link = field(init=False)

    def __post_init__(self) -> None:
        self.link = Link(self.socket.fileno(), self.socket.fileno(), schema.CALLER)

    def answer(self, frame: Frame) -> None:
        """Queue an answer for the caller. Never blocks: bytes are sent as the connection accepts them."""
        self.link.post(frame.encode())


@dataclass(eq=False, slots=True)
class StackInquiry:
    """A caller's request for stack traces, with the ranks whose stack traces are still missing."""

    caller: Caller
    ranks: set[int]
    deadline: float


class Channels(Protocol):
    """Interface of the object by which `Query` sends frames to agents and waits for sockets."""

    def watch(self, source: Any, read: Callable[[], Any]) -> None: ...
    def forget(self, source: Any) -> None: ...
    def send_all(self, frame: Frame) -> None: ...


class Watched(Protocol):
    """Interface of the object from which `Query` reads the state of the job and its ranks."""

    begin: float
    state: str
    links: HostLinks

    @property
    def gauges(self) -> Sequence[Gauge]: ...


@dataclass(eq=False)
class Query:
    """The launcher's end of the connections from other `dadt` commands. Single-threaded: it uses the job's selector and
    never waits for a caller."""

    _folder: Folder
    _agents: Channels
    _watch: Watched
    _facts: Mapping[str, Any]
    """Facts about the job that do not change, such as its id and command."""
    _end: Callable[[], float]
    """Function that ends the job, and returns the seconds until workers are killed."""
    _refused: Callable[[str], None]
    """Function that is called with the reason when a caller is disconnected."""
    _callers: list[Caller] = field(default_factory=list)
    _inquiries: dict[int, StackInquiry] = field(default_factory=dict)
    _numbered: int = 0
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._entrance = Entrance(listen_at(self._folder.query, BACKLOG), self._drop)
        self._agents.watch(self._entrance.server, self._accept)

    def turn(self) -> float:
        """Send bytes that connections did not accept before, and answer requests for which agents took too long.
        Returns the seconds until the next call is due."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._tend()
        for number, inquiry in list(self._inquiries.items()):
            if now >= inquiry.deadline:
                for rank in sorted(inquiry.ranks):
                    late = {"number": number, "rank": rank, "problem": "the agent of its host did not answer"}
                    self.told(Frame("stack", late))
        for caller in list(self._callers):
            self._flush(caller)
        if any(caller.link.unsent for caller in self._callers):
            return WRITE_SECONDS
        return min((inquiry.deadline - now for inquiry in self._inquiries.values()), default=float("inf"))

    def _tend(self) -> None:
        """Create the socket again, if something that cleans up /tmp has removed it."""
        # If this fails, the job continues and a later call tries again. Until then, other commands cannot find the job.
        with suppress(OSError, LaunchError):
            self._folder.tend()
            if not self._folder.query.exists():
                server = listen_at(self._folder.query, BACKLOG)
                self._accept()  # a caller that connected before the socket was removed
                self._agents.forget(self._entrance.server)
                self._entrance.renew(server)
                self._agents.watch(server, self._accept)

    def told(self, frame: Frame) -> None:
        """Forward an agent's answer with the stack traces of a rank to the caller that has asked for it."""
        inquiry = self._inquiries.get(frame["number"])
        if inquiry is None or frame["rank"] not in inquiry.ranks:
            return  # the answer came after the deadline
        inquiry.ranks.discard(frame["rank"])
        about = {**frame.header, **self._watch.gauges[frame["rank"]].describe(time.monotonic())}
        inquiry.caller.answer(Frame("stack", about, frame.body))
        if not inquiry.ranks:
            del self._inquiries[frame["number"]]
            inquiry.caller.answer(Frame("end"))

    def close(self) -> None:
        """Close the connections to all callers, which tells them that the job is over. Call this after the connections
        to the agents are closed. Idempotent."""
        for caller in self._callers:
            try:
                caller.link.flush()
            except BrokenPipeError:
                pass  # the caller has disconnected already
            caller.socket.close()
        self._callers.clear()
        self._entrance.close()
        self._folder.query.unlink(missing_ok=True)  # the next attempt of the job creates a new socket

    def _describe(self, caller: Caller, question: Frame) -> None:
        ranks = [gauge.describe(time.monotonic()) for gauge in self._watch.gauges]
        links = self._watch.links.describe(time.monotonic())
        about = {"begin": self._watch.begin, "state": self._watch.state, "ranks": ranks, "links": links}
        caller.answer(Frame("description", {**self._facts, **about}))

    def _stacks(self, caller: Caller, question: Frame) -> None:
        """Request from the agents the stack traces of those ranks in the question that have not ended; None in the
        question means all ranks."""
        asked = question["ranks"]
        ranks = {gauge.rank for gauge in self._watch.gauges if not gauge.member.ended}
        ranks = ranks if asked is None else ranks & set(asked)
        if not ranks:
            caller.answer(Frame("end"))
            return
        self._numbered += 1
        self._inquiries[self._numbered] = StackInquiry(caller, ranks, time.monotonic() + STACKS_SECONDS)
        self._agents.send_all(Frame("stacks", {"number": self._numbered, "ranks": sorted(ranks)}))

    def _kill(self, caller: Caller, question: Frame) -> None:
        living = [gauge for gauge in self._watch.gauges if not gauge.member.ended]
        names = [
            f"rank {gauge.rank} ({f'{gauge.host}, ' if gauge.host else ''}pid {gauge.member.pid})" for gauge in living
        ]
        caller.answer(Frame("killed", {"workers": names, "grace": self._end()}))

    def _accept(self) -> None:
        connection = self._entrance.accept()
        if connection is None:
            return
        if len(self._callers) >= MOST_CALLERS:
            self._entrance.settle(connection)
            connection.close()
            return
        caller = Caller(connection)
        self._callers.append(caller)
        self._agents.watch(connection, lambda: self._read(caller))

    def _read(self, caller: Caller) -> None:
        try:
            frames = caller.link.receive()
        except EOFError:
            self._hang_up(caller)
            return
        except DadtError as error:
            self._refused(str(error))
            self._hang_up(caller)
            return
        for frame in frames:
            waits = any(inquiry.caller is caller for inquiry in self._inquiries.values())
            if waits or len(caller.link.unsent) > UNSENT_LIMIT:
                self._refused("a caller asked on without waiting for the answers")
                self._hang_up(caller)
                return
            self._entrance.settle(caller.socket)
            QUESTIONS[frame.kind](self, caller, frame)
        self._flush(caller)

    def _drop(self, connection: socket.socket) -> None:
        for caller in self._callers:
            if caller.socket is connection:
                self._hang_up(caller)
                return

    def _flush(self, caller: Caller) -> None:
        try:
            caller.link.flush()
        except BrokenPipeError:
            self._hang_up(caller)

    def _hang_up(self, caller: Caller) -> None:
        if caller in self._callers:
            self._callers.remove(caller)
            self._inquiries = {n: each for n, each in self._inquiries.items() if each.caller is not caller}
            self._entrance.settle(caller.socket)
            self._agents.forget(caller.socket)
            caller.socket.close()


QUESTIONS = {"describe": Query._describe, "stacks": Query._stacks, "kill": Query._kill}


class CallerLine:
    """The end of a connection to a launcher or an agent from another `dadt` command."""

    def __init__(self, path: Path) -> None:
        """Connect to the socket at this path. Raises OSError if no process listens there."""
        self._socket = connect_to(path, ANSWER_SECONDS)
        self._parser = Parser(schema.TOLD)

    def __enter__(self) -> CallerLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def pid(self) -> int:
        """Id of the process that listens at the socket, according to the kernel."""
        return peer_of(self._socket).pid

    def ask(self, frame: Frame, seconds: float = ANSWER_SECONDS) -> Iterator[Frame]:
        """Send a question, and yield the answers as they arrive, until the connection ends. Raises TimeoutError if it
        has not ended after `seconds` seconds."""
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        # The other side is closing the connection, but answers that it has sent before can still be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(frame.encode())
        while True:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(CHUNK)
            except ConnectionResetError:
                return
            if not data:
                return
            yield from self._parser.feed(data)

    def ended(self, seconds: float) -> bool:
        """Wait at most `seconds` seconds for the other side to close the connection. Returns whether it did."""
        deadline = time.monotonic() + seconds
        while select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                if not self._socket.recv(CHUNK):
                    return True
            except ConnectionResetError:
                return True
        return False
