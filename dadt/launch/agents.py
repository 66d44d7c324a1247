"""The agents of a job, one per host, as the launcher sees them: it receives their frames and sends orders."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dadt.control.frame import Frame
from dadt.errors import DadtError, LaunchError
from dadt.launch.channel import Channel, Launcher
from dadt.launch.hosts.host import Host

BEATS = 6
"""Heartbeats that each side sends within the timeout after which the other gives it up."""
EXPLAIN_SECONDS = 2.0
"""How long to wait for the reason of an agent's end."""


@dataclass(slots=True, eq=False)
class Node:
    """One host of the job and its agent."""

    index: int
    host: Host
    channel: Channel | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    """The agent's report about its host; empty until it is ready."""
    address: str = ""
    """Address at which the other hosts reach it; empty in a job of one host."""
    interface: str = ""
    folder: int | None = None
    """A number that hosts have in common that see the same working folder; None if it is not known."""
    ranks: frozenset[int] = frozenset()
    """Ranks of its workers, the only ones of which it may speak."""
    state: str = "is not connected"
    heard: float = 0.0
    """Time of its last frame (time.monotonic)."""
    clock: float = float("-inf")
    """Its clock minus this one's, in seconds: a lower bound, off by the travel time of the fastest frame."""
    done: bool = False
    """Whether it has reported that all of its workers have ended."""
    told: bool = False
    """Whether somebody other than the launcher has asked it to end."""
    ended: bool = False
    """Whether nothing more comes from it."""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def failed(self) -> bool:
        """Whether its workers, which it had, can run there no more."""
        return self.told or (self.ended and not self.done)

    @property
    def reached(self) -> bool:
        """Whether its agent has reported about its host."""
        return "version" in self.report


class Agents:
    """All agents of a job. Single-threaded, except that the launcher may connect in threads."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Sequence[Host],
        orphan_timeout: float,
        see: Callable[[str, Frame], None] = lambda host, frame: None,
    ) -> None:
        """Begins to start the agents. see: called with every frame and its host."""
        self.nodes = [Node(index, host) for index, host in enumerate(hosts)]
        self.orphan_timeout = orphan_timeout
        self._launcher = launcher
        self._see = see
        self._events: list[tuple[Node, Frame]] = []
        self._beat = 0.0
        self._turned = time.monotonic()
        started = launcher.launch(list(hosts))  # before there is anything to close, as it may raise
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        self._wake.setblocking(False)  # a full one wakes as well, and nobody reads it while this is closed
        self._selector.register(self._waker, selectors.EVENT_READ, lambda: self._waker.recv(4096))
        self._futures: dict[Node, Future[Channel]] = {}
        for node, future in zip(self.nodes, started, strict=True):
            self._expect(node, future)

    def _expect(self, node: Node, future: Future[Channel]) -> None:
        self._futures[node] = future
        future.add_done_callback(lambda _: self._poke())

    def watch(self, source: Any, read: Callable[[], Any]) -> None:
        """Call `read` in `turn` whenever there is something to read from the descriptor."""
        self._selector.register(source, selectors.EVENT_READ, read)

    def forget(self, source: Any) -> None:
        self._selector.unregister(source)

    def turn(self, seconds: float) -> Iterator[tuple[Node, Frame]]:
        """Wait at most `seconds` for frames, and yield them. Two kinds are made here: `connected`, and `lost`
        {message}, the last frame of a node."""
        self._excuse()
        self.beat()
        for node in self.nodes:
            self._watch_writes(node)
        if not self._events:
            for key, _ in self._selector.select(max(0.0, min(seconds, self.orphan_timeout / BEATS))):
                key.data()
        self._excuse()
        self._collect()
        for node in self.nodes:
            self._flush(node)
            silence = time.monotonic() - node.heard
            # An agent that is not ready yet may be busy for long, for example with the prologue.
            if node.report and not node.ended and silence > self.orphan_timeout:
                self._lose(node, f"no sign of life for {silence:.0f} s", 0.0)
        events, self._events = self._events, []
        for node, frame in events:
            self._see(node.name, frame)
            yield node, frame

    def _excuse(self) -> None:
        """Forgive silence while this process itself was away (suspended, or blocked by a slow reader)."""
        now = time.monotonic()
        if now - self._turned > self.orphan_timeout / 2:
            for node in self.nodes:
                node.heard = now
        self._turned = now

    def _watch_writes(self, node: Node) -> None:
        """Wake up when the bytes that did not fit can be written."""
        if node.channel is None or node.ended:
            return
        writer, waiting = node.channel.link.writer, bool(node.channel.link.unsent)
        if waiting != (writer in self._selector.get_map()):
            if waiting:
                self._selector.register(writer, selectors.EVENT_WRITE, lambda: self._flush(node))
            else:
                self._selector.unregister(writer)

    def beat(self) -> None:
        """Send the agents a heartbeat, if one is due. To be called while nobody calls `turn`."""
        now = time.monotonic()
        if now - self._beat >= self.orphan_timeout / BEATS:
            self._beat = now
            self.send_all(Frame("beat"))

    def send(self, node: Node, frame: Frame) -> None:
        if node.channel is not None and not node.ended:
            node.channel.link.post(frame.encode())
            self._flush(node)

    def send_all(self, frame: Frame) -> None:
        for node in self.nodes:
            self.send(node, frame)

    def reply(self, node: Node, question: Frame) -> Callable[[Frame], None]:
        """A function that answers this question of a worker."""
        line = question["line"]

        def send(answer: Frame) -> None:
            header = {"line": line, "answer": {"kind": answer.kind, **answer.header}}
            self.send(node, Frame("answer", header, answer.body))

        return send

    def dismiss(self, nodes: Sequence[Node]) -> None:
        """End the agents of these hosts, which get no workers."""
        for node in nodes:
            self._finish(node, EXPLAIN_SECONDS)
            self.nodes.remove(node)
            if (future := self._futures.pop(node, None)) is not None and not future.cancel():
                future.add_done_callback(_hang_up)
        self._events = [(node, frame) for node, frame in self._events if node in self.nodes]

    def replace(self, place: int, host: Host) -> Node:
        """Begin to start an agent on another host, which has the place of one whose agent is gone."""
        node = self.nodes[place] = Node(self.nodes[place].index, host)
        self._expect(node, self._launcher.launch([host])[0])
        return node

    def give_up(self, node: Node) -> None:
        """End the agent of a host that cannot come; its place is kept."""
        self._finish(node, 0.0)
        node.ended = True
        if (future := self._futures.pop(node, None)) is not None and not future.cancel():
            future.add_done_callback(_hang_up)

    def close(self, seconds: float) -> None:
        """Hang up, and wait until all agents are gone. Idempotent."""
        deadline = time.monotonic() + seconds
        for node in self.nodes:
            if node.channel is not None:
                self._unwatch(node)
                node.channel.hang_up()
        for node in self.nodes:
            self._finish(node, max(0.0, deadline - time.monotonic()))
        self._launcher.close()
        for future in self._futures.values():
            if not future.cancel():
                future.add_done_callback(_hang_up)
        self._futures.clear()
        self._selector.close()
        self._wake.close()
        self._waker.close()

    def _collect(self) -> None:
        """Collect the futures that were settled since the last call."""
        for node, future in list(self._futures.items()):
            if not future.done():
                continue
            del self._futures[node]
            error = future.exception()
            if error is None:
                node.channel = future.result()
                node.heard = time.monotonic()
                node.state = "has not answered yet"
                self._selector.register(node.channel.link.reader, selectors.EVENT_READ, lambda n=node: self._read(n))
                self._events.append((node, Frame("connected")))
            elif isinstance(error, LaunchError):
                node.ended = True
                self._events.append((node, Frame("lost", {"message": str(error)})))
            else:
                raise error

    def _read(self, node: Node) -> None:
        assert node.channel is not None
        try:
            frames = node.channel.link.receive()
        except EOFError:
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
            others = _named(frame) - node.ranks
            if others or frame.get("peer", 0) >= len(self.nodes):
                what = f"rank {min(others)}, which is not on its host" if others else f"host {frame['peer']} of the job"
                self._lose(node, f"it spoke of {what} ({frame.kind!r})", 0.0)
                return
            if frame.kind == "wrote":
                self._pass_on(node, frame)
                continue
            if "clock" in frame.header:
                node.clock = max(node.clock, frame["clock"] - time.time())
            node.done = node.done or frame.kind == "end"
            node.told = node.told or frame.kind == "preempted" or (frame.kind == "end" and frame["signal"] > 0)
            self._events.append((node, frame))

    def _pass_on(self, node: Node, frame: Frame) -> None:
        """Send a frame on to the other hosts that see the same folder as this one."""
        told = Frame(frame.kind, {name: value for name, value in frame.header.items() if name != "line"})
        for other in self.nodes:
            if other is not node and other.folder is not None and other.folder == node.folder:
                self.send(other, told)

    def _flush(self, node: Node) -> None:
        if node.channel is None or node.ended:
            return
        try:
            node.channel.link.flush()
        except BrokenPipeError:
            pass  # the agent is gone, which reading from it reports

    def _lose(self, node: Node, why: str, seconds: float) -> None:
        at = time.time()  # taken first, so that the consequences do not seem to come before it
        told = self._finish(node, seconds)
        # With no time to explain, the agent is ended here, and how it ends does not say why.
        self._events.append((node, Frame("lost", {"message": told or why if seconds else why, "time": at})))

    def _finish(self, node: Node, seconds: float) -> str:
        if node.channel is None:
            return ""
        self._unwatch(node)
        node.ended = True
        return node.channel.end(seconds)

    def _unwatch(self, node: Node) -> None:
        assert node.channel is not None
        if not node.ended:
            self._selector.unregister(node.channel.link.reader)
            if node.channel.link.writer in self._selector.get_map():
                self._selector.unregister(node.channel.link.writer)
        node.ended = True

    def _poke(self) -> None:
        """Wake the selector; called from other threads."""
        try:
            self._wake.send(b"1")
        except OSError:
            pass  # full; or closed, so the new connection is closed as well


def _named(frame: Frame) -> set[int]:
    """The ranks that an agent's frame is about."""
    if frame.kind == "beat":
        return {int(rank) for facts in ("steps", "memory", "conditions") for rank in frame[facts]}
    return {frame["rank"]} if "rank" in frame.header else set()


def _hang_up(future: Future[Channel]) -> None:
    """Close a connection that came too late."""
    if not future.cancelled() and future.exception() is None:
        future.result().hang_up()
