"""The launcher's connections to the agents of a job, one agent per host."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from dadt.control.frame import Frame
from dadt.control.uptime import uptime
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
"""Seconds to wait for an agent's exit, which explains why its connection was closed."""
FURTHER_SECONDS = 0.1
"""The same for further agents that are found to be lost then: together they must not keep the launcher from those that
are left."""


class Agents:
    """The connections to all agents of a job. Used by a single thread, except that the launcher may connect to agents
    in threads of its own."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Sequence[Host],
        orphan_timeout: float,
        see: Callable[[str, Frame], None] = lambda host, frame: None,
    ) -> None:
        """Begin to start one agent per host. orphan_timeout: seconds of silence after which an agent counts as lost.
        see: called with the name of the host and each frame that its agent has sent."""
        self.nodes = [Node(index, host) for index, host in enumerate(hosts)]
        self._contact = Contact(self.nodes, orphan_timeout, time.monotonic())
        self._channels: dict[Node, Channel] = {}
        self._launcher = launcher
        self._see = see
        self._events: deque[tuple[Node, Frame]] = deque()
        self._losses: list[tuple[Node, Frame]] = []
        """Agents that were lost and are not in `_events` yet."""
        started = launcher.launch(list(hosts))  # launch() may raise, so no descriptors are opened before it
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        # A send must not block: if the buffer is full, the reader wakes up anyway, and after close() nothing empties
        # the buffer.
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
        known = 0
        while known < len(self._losses):  # others may have sent frames, or ended, while `_lose` waited
            known = len(self._losses)
            for key, _ in self._selector.select(0.0):
                key.data()
        self._events += self._losses
        self._losses.clear()
        while self._events:  # if the caller stops early, the next call yields the remaining frames
            node, frame = self._events.popleft()
            self._see(node.name, frame)
            yield node, frame

    def go_through(self, steps: Steps[T], outbox: Outbox, perform: Callable[[Action], None]) -> T:
        """Run a generator of decisions to its end: pass it the events for which it waits, and carry out its actions by
        calling `perform`. Returns the generator's result."""
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
        """Carry out an action that was requested during the job's startup. look: returns, for a node, the fields of the
        order to report about the host."""
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
        """Have the selector wake up as soon as this agent's connection accepts more bytes, if there are unsent ones."""
        if (channel := self._channels.get(node)) is None or node.ended:
            return
        writer, waiting = channel.link.writer, bool(channel.link.unsent)
        if waiting != (writer in self._selector.get_map()):
            if waiting:
                self._selector.register(writer, selectors.EVENT_WRITE, lambda: self._flush(node))
            else:
                self._selector.unregister(writer)

    def beat(self) -> None:
        """Send all agents a heartbeat, if one is due. `turn` calls this; call it also during other work that takes
        long."""
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
        """Return the text that a login shell printed on this host before the agent's first frame."""
        return channel.link.parser.preface if (channel := self._channels.get(node)) is not None else b""

    def dismiss(self, nodes: Sequence[Node]) -> None:
        """End the agents of these hosts, on which no workers will run, and remove the hosts from the job."""
        for node in nodes:
            self.give_up(node, EXPLAIN_SECONDS)
        self._events = deque(event for event in self._events if event[0] in self.nodes)

    def reach(self, node: Node) -> None:
        """Begin to start the agent of a host that takes the place of a lost host."""
        self._expect(node, self._launcher.launch([node.host])[0])

    def give_up(self, node: Node, seconds: float = 0.0) -> None:
        """End the agent of a host that could not join the job, and kill the agent if it has not ended after `seconds`
        seconds. The node stays in the list of nodes, marked as ended."""
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
            node.ended |= bool(self._disconnect(node, max(0.0, deadline - time.monotonic())))
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
                self._lose(node, "the connection was closed", FURTHER_SECONDS if self._losses else EXPLAIN_SECONDS)
            return
        except DadtError as error:
            self._lose(node, str(error), 0.0)
            return
        node.heard = time.monotonic()
        for frame in frames:
            if refusal := self._contact.hear(node, frame, uptime()):
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
        at = uptime()  # read the clock before the wait, so that consequences of the loss do not seem to precede it
        told = self._finish(node, seconds)
        # With `seconds` 0 the launcher itself kills the agent, so the way in which the agent ended does not explain the
        # loss.
        self._losses.append((node, Frame("lost", {"message": told or why if seconds else why, "time": at})))

    def _finish(self, node: Node, seconds: float) -> str:
        node.ended = True
        return self._disconnect(node, seconds)

    def _disconnect(self, node: Node, seconds: float) -> str:
        """Return how the agent has ended (see Channel.end)."""
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
    """Cancel the attempt to connect to an agent. If it can no longer be cancelled, close the connection once it is
    made."""

    def hang_up(future: Future[Channel]) -> None:
        if not future.cancelled() and future.exception() is None:
            future.result().hang_up()

    if not future.cancel():
        future.add_done_callback(hang_up)
