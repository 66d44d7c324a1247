"""Connections over which the processes of a host's workers talk to the host's agent."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dadt.control import schema
from dadt.control.accept import MOST_AT_ONCE, Entrance, peer_of
from dadt.control.frame import Frame, Link
from dadt.control.schema import Speaker
from dadt.errors import DadtError
from dadt.launch.agent.launcher_line import LauncherLine
from dadt.launch.agent.registry import Line
from dadt.launch.ending.processes import Process

UNSENT_LIMIT = 64 << 20
"""Largest number of bytes of answers that a process may leave unread."""


@dataclass(frozen=True, slots=True)
class OpenLine:
    """A worker's open connection, with the objects that read and write it."""

    line: Line
    link: Link
    socket: socket.socket
    entrance: Entrance


@dataclass(eq=False)
class Lines:
    """Accepts the connections of a host's workers, reads their frames and sends answers, without ever blocking."""

    _speaker: Speaker
    """A worker as the sender of frames, which may send frames of some kinds only."""
    _launcher: LauncherLine
    _connected: Callable[[Line], None]
    """Called with each new connection."""
    _hear: Callable[[Line, Frame], None]
    """Called with each frame that is received; raises DadtError if the process may not send the frame."""
    _hung_up: Callable[[int], None]
    """Called with the number of each closed connection."""
    _open: dict[int, OpenLine] = field(default_factory=dict)
    _count: int = 0

    def accept(self, rank: int, entrance: Entrance) -> None:
        """Accept the connections waiting at the socket of this rank."""
        for _ in range(MOST_AT_ONCE):
            if (connection := entrance.accept()) is None:
                return
            self._count += 1
            link = Link(connection.fileno(), connection.fileno(), self._speaker)
            line = Line(self._count, rank, Process.of(peer_of(connection).pid))
            self._open[line.number] = OpenLine(line, link, connection, entrance)
            self._connected(line)
            self._launcher.watch(link.reader, partial(self.read, line.number))

    def read(self, number: int) -> None:
        """Handle the frames that have arrived on connection `number`, and send bytes that its socket could not accept
        before."""
        if (opened := self._open.get(number)) is None:
            return  # the connection was closed after the selector had reported it
        try:
            opened.link.flush()
            for frame in opened.link.receive():
                self._take(opened, frame)
        except (EOFError, BrokenPipeError):
            self._close(opened)
        except DadtError as error:
            self._launcher.send(Frame("refused", {"rank": opened.line.rank, "why": str(error)[: schema.TEXT]}))
            self._close(opened)

    def read_all(self) -> None:
        for number in list(self._open):
            self.read(number)

    def answer(self, number: int, frame: Frame) -> bool:
        """Send a frame on connection `number`. Returns False if the connection is closed or its process does not
        receive any more."""
        if (opened := self._open.get(number)) is None:
            return False
        try:
            opened.link.send(frame)
        except BrokenPipeError:
            # The process has died or has stopped receiving. Frames that it sent before are still read.
            opened.link.unsent.clear()
            opened.line.listens = False
            return False
        if len(opened.link.unsent) > UNSENT_LIMIT + len(frame.body):
            opened.link.unsent.clear()
            opened.socket.shutdown(socket.SHUT_RDWR)  # the process sends questions without reading the answers
        return True

    def drop(self, connection: socket.socket) -> None:
        """Close the connection of a process that has not proved that it belongs to the job, to make room for another
        connection."""
        for opened in [each for each in self._open.values() if each.socket is connection]:
            self._close(opened)

    def watch_writes(self) -> None:
        """Have the selector wake up when a connection accepts the bytes that could not be sent yet."""
        selector = self._launcher.selector
        for opened in self._open.values():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if opened.link.unsent else 0)
            key = selector.get_key(opened.link.reader)
            if key.events != events:
                selector.modify(opened.link.reader, events, key.data)

    def _take(self, opened: OpenLine, frame: Frame) -> None:
        rank = opened.line.rank
        if frame["rank"] != rank:
            raise DadtError(f"{frame.kind!r} for rank {frame['rank']} came from a process of rank {rank}")
        opened.entrance.settle(opened.socket)
        self._hear(opened.line, frame)

    def _close(self, opened: OpenLine) -> None:
        if self._open.pop(opened.line.number, None) is None:
            return
        self._launcher.selector.unregister(opened.link.reader)
        opened.entrance.settle(opened.socket)
        opened.socket.close()
        self._hung_up(opened.line.number)
