"""Connections of the launcher to the agents of a job, one agent per host."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from dadt.control.frame import Frame
from dadt.errors import DadtError, LaunchError
from dadt.launch import actions
from dadt.launch.actions import Action, Event, Outbox, StartAction, Steps, TimeReached, unknown
from dadt.launch.channel import Channel, ChannelWithNotes, Launcher
from dadt.launch.contact import Contact
from dadt.launch.hosts.host import Host
from dadt.launch.launchers.local import LocalChannel
from dadt.launch.members.node import Node
from dadt.launch.start.startup import Voice

T = TypeVar("T")
EXPLAIN_SECONDS = 2.0
"""Seconds to wait for an explanation of why an agent ended."""


class Agents:
    """All agents of a job. Used by a single thread, except that the launcher may connect to agents in threads of its
    own."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Sequence[Host],
        orphan_timeout: float,
        see: Callable[[str, Frame], None] = lambda host, frame: None,
    ) -> None:
        """Begin to start one agent per host. orphan_timeout: seconds of silence after which an agent counts as lost.
        see: called with each frame and the name of its host."""
        self.nodes = [Node(index, host) for index, host in enumerate(hosts)]
        self._contact = Contact(self.nodes, orphan_timeout, time.monotonic())
        self._channels: dict[Node, Channel] = {}
        self._launcher = launcher
        self._see = see
        self._events: deque[tuple[Node, Frame]] = deque()
        started = launcher.launch(list(hosts))  # launch() may raise, so nothing is open before it
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        # A send need not block, as a full buffer wakes the reader as well. After close(), nobody empties the buffer.
        self._wake.setblocking(False)
        self._selector.register(self._waker, selectors.EVENT_READ, lambda: self._waker.recv(4096))
        self._futures: dict[Node, Future[Channel]] = {}
        for node, future in zip(self.nodes, started, strict=True):
            self._expect(node, future)

    def _expect(self, node: Node, future: Future[Channel]) -> None:
        self._futures[node] = future
        future.add_done_callback(lambda _: self._poke())

    def watch(self, source: Any, read: Callable[[], Any]) -> None:
        """Call `read` during `turn` whenever the descriptor `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, read)

    def forget(self, source: Any) -> None:
        self._selector.unregister(source)

    def turn(self, seconds: float) -> Iterator[tuple[Node, Frame]]:
        """Wait at most `seconds` for frames, and yield each with its node. Two kinds are created here rather than
        received: `connected`, and `lost` {message}, which is the last frame of a node."""
        self._contact.excuse(time.monotonic())
        self.beat()
        for node in self.nodes:
            self._watch_writes(node)
        if not self._events:
            for key, _ in self._selector.select(max(0.0, min(seconds, self._contact.beat_seconds))):
                key.data()
        self._contact.excuse(time.monotonic())
        self._collect()
        for node in self.nodes:
            self._flush(node)
        for node, why in self._contact.silent(time.monotonic()):
            self._lose(node, why, 0.0)
        while self._events:  # frames that the caller does not take are yielded by the next call
            node, frame = self._events.popleft()
            self._see(node.name, frame)
            yield node, frame

    def go_through(self, steps: Steps[T], outbox: Outbox, perform: Callable[[Action], None]) -> T:
        """Run a generator of decisions to its end: pass it the events for which it waits, and have its actions carried
        out. Returns the generator's result."""
        try:
            until = next(steps)
            while True:
                outbox.empty(perform)
                for node, frame in self.turn(until - time.monotonic()):
                    until = steps.send(Event(node, frame, time.monotonic()))
                    outbox.empty(perform)
                until = steps.send(TimeReached(time.monotonic()))
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            outbox.empty(perform)

    def start_up(self, action: StartAction, voice: Voice, look: Callable[[Node], Mapping[str, Any]]) -> None:
        """Carry out an action of a job's startup. look: returns the fields of the order to report about a host."""
        match action:
            case actions.SendFrame(frame, node) if node is not None:
                self.send(node, frame)
            case actions.SendFrame(frame):
                self.send_all(frame)
            case actions.SayText(text, level):
                voice.say(text, level)
            case actions.SayPart(text, last):
                voice.part(text, last)
            case actions.AskHost(node, place):
                self.send(node, Frame("look", {**look(node), "index": place, "hosts": len(self.nodes)}))
            case actions.DismissHosts(nodes):
                self.dismiss(nodes)
            case _:
                unknown(action)

    def _watch_writes(self, node: Node) -> None:
        """Have the selector wake up as soon as this agent's connection accepts the bytes that are still unsent."""
        if (channel := self._channels.get(node)) is None or node.ended:
            return
        writer, waiting = channel.link.writer, bool(channel.link.unsent)
        if waiting != (writer in self._selector.get_map()):
            if waiting:
                self._selector.register(writer, selectors.EVENT_WRITE, lambda: self._flush(node))
            else:
                self._selector.unregister(writer)

    def beat(self) -> None:
        """Send all agents a heartbeat, if one is due. `turn` does this by itself; call this during other work that
        takes long."""
        if self._contact.is_beat_due(time.monotonic()):
            self.send_all(Frame("beat"))

    def send(self, node: Node, frame: Frame) -> None:
        if (channel := self._channels.get(node)) is not None and not node.ended:
            channel.link.post(frame.encode())
            self._flush(node)

    def send_all(self, frame: Frame) -> None:
        for node in self.nodes:
            self.send(node, frame)

    def preface(self, node: Node) -> bytes:
        """Return what a login shell printed before the agent's first frame."""
        return channel.link.parser.preface if (channel := self._channels.get(node)) is not None else b""

    def dismiss(self, nodes: Sequence[Node]) -> None:
        """End the agents of these hosts, on which no workers will run, and remove the hosts from the job."""
        for node in nodes:
            self.give_up(node, EXPLAIN_SECONDS)
        self._events = deque(event for event in self._events if event[0] in self.nodes)

    def reach(self, node: Node) -> None:
        """Begin to start the agent of a host that replaces one whose agent is gone."""
        self._expect(node, self._launcher.launch([node.host])[0])

    def give_up(self, node: Node, seconds: float = 0.0) -> None:
        """End the agent of a host that could not be brought into the job; kill the agent after `seconds` seconds. The
        node stays in the list, marked as ended."""
        self._finish(node, seconds)
        if (future := self._futures.pop(node, None)) is not None:
            _discard(future)

    def close(self, seconds: float) -> None:
        """Disconnect from all agents, and wait at most `seconds` seconds until they are gone. Idempotent."""
        deadline = time.monotonic() + seconds
        for node in self.nodes:
            if (channel := self._channels.get(node)) is not None:
                self._unwatch(channel)
                channel.hang_up()
        for node in self.nodes:
            self._finish(node, max(0.0, deadline - time.monotonic()))
        self._launcher.close()
        for future in self._futures.values():
            _discard(future)
        self._futures.clear()
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def _collect(self) -> None:
        """Handle the connections to agents that were made, or have failed, since the last call."""
        for node, future in list(self._futures.items()):
            if not future.done():
                continue
            del self._futures[node]
            error = future.exception()
            if error is None:
                channel = self._channels[node] = future.result()
                node.is_child = isinstance(channel, LocalChannel)
                node.notes = channel.notes if isinstance(channel, ChannelWithNotes) else ()
                node.heard = time.monotonic()
                node.state = "has not answered yet"
                self._selector.register(channel.link.reader, selectors.EVENT_READ, lambda n=node: self._read(n))
                self._events.append((node, Frame("connected")))
            elif isinstance(error, LaunchError):
                node.ended = True
                self._events.append((node, Frame("lost", {"message": str(error)})))
            else:
                raise error

    def _read(self, node: Node) -> None:
        try:
            frames = self._channels[node].link.receive()
        except EOFError:
            node.closed = True
            if node.done:
                self._finish(node, EXPLAIN_SECONDS)
            else:
                self._lose(node, "the connection was closed", EXPLAIN_SECONDS)
            return
        except DadtError as error:
            self._lose(node, str(error), 0.0)
            return
        node.heard = time.monotonic()
        for frame in frames:
            if refusal := self._contact.hear(node, frame, time.time()):
                self._lose(node, refusal, 0.0)
                return
            self._events.append((node, frame))

    def _flush(self, node: Node) -> None:
        if (channel := self._channels.get(node)) is None or node.ended:
            return
        try:
            channel.link.flush()
        except BrokenPipeError:
            pass  # the agent is gone; the next read from it reports that

    def _lose(self, node: Node, why: str, seconds: float) -> None:
        at = time.time()  # read the clock before waiting, so that consequences of the loss do not appear to precede it
        told = self._finish(node, seconds)
        # After 0 seconds the launcher itself kills the agent, so the agent's exit would not explain the loss.
        self._events.append((node, Frame("lost", {"message": told or why if seconds else why, "time": at})))

    def _finish(self, node: Node, seconds: float) -> str:
        node.ended = True
        if (channel := self._channels.pop(node, None)) is None:
            return ""
        self._unwatch(channel)
        return channel.end(seconds)

    def _unwatch(self, channel: Channel) -> None:
        for descriptor in (channel.link.reader, channel.link.writer):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)

    def _poke(self) -> None:
        """Wake the selector from another thread."""
        try:
            self._wake.send(b"1")
        except OSError:
            pass  # a full buffer wakes the selector, too; if the socket is closed, `close` handles the new connection


def _discard(future: Future[Channel]) -> None:
    """Cancel the connection to an agent; close it if it is made nevertheless."""

    def hang_up(future: Future[Channel]) -> None:
        if not future.cancelled() and future.exception() is None:
            future.result().hang_up()

    if not future.cancel():
        future.add_done_callback(hang_up)
