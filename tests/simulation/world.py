"""A world of its own: virtual time, processes, connections of control, and the network between hosts."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from dadt.control.frame import Frame, Parser
from dadt.control.schema import Speaker
from dadt.errors import DadtError

EPOCH = 1_700_000_000.0
"""Seconds since the epoch when the world's time is 0."""
BEGIN = 1000.0
"""The time (as time.monotonic) at which each world begins."""
MOST_EVENTS = 400_000
"""Events in a job, far above what the largest one drawn takes: more of them is a fault by itself."""

Do = Callable[[], None]


class Broken(BaseException):
    """Something does not hold that has to hold in every job. No `except Exception` of the code under test takes it."""


class Crashed(BaseException):
    """The code under test has raised what it may not raise, and would take for the error of a library."""


class Timer:
    """Something that happens at a time, unless it is cancelled before."""

    __slots__ = ("do",)

    def __init__(self, do: Do) -> None:
        self.do: Do | None = do

    def cancel(self) -> None:
        self.do = None


class World:
    """Events in the order of their time. What is left open is decided by a seed."""

    def __init__(self, seed: int, *, logs: bool = False) -> None:
        self.random = Random(seed)
        self.now = BEGIN
        self.events = self.frames = 0
        self.most_events = MOST_EVENTS
        self.exact = self.random.random() < 0.1
        """Whether each frame is really encoded and parsed, as in a part of all worlds, since that takes most of their
        time."""
        self.log: list[tuple[float, str, str]] | None = [] if logs else None
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0

    @property
    def epoch(self) -> float:
        return EPOCH + self.now

    def note(self, who: str, text: str) -> None:
        """Add a line to the log."""
        if self.log is not None:
            self.log.append((self.now - BEGIN, who, text))

    def after(self, seconds: float, do: Do) -> Timer:
        self._count += 1
        timer = Timer(do)
        heapq.heappush(self._heap, (self.now + seconds, self._count, timer))
        return timer

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Let time pass. Returns whether `until` came true by the deadline."""
        heap, pop = self._heap, heapq.heappop
        while heap and not until():
            at, number, timer = pop(heap)
            if (do := timer.do) is None:
                continue
            if at > deadline:
                heapq.heappush(heap, (at, number, timer))
                break
            self.now = at
            self.events += 1
            if self.events > self.most_events:
                raise Broken(f"more than {self.most_events:,} events")
            do()
        return until()

    def spread(self, seconds: float) -> float:
        """About so many seconds."""
        return seconds * (0.5 + self.random.random())


class Process:
    """Something that runs, stops, goes on and ends. While it is stopped, what comes to it waits in order."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.stops = True, 0
        self._held: list[Do] = []

    @property
    def runs(self) -> bool:
        return self.alive and not self.stops

    def get(self, do: Do) -> None:
        """Do this now, or once the process goes on."""
        if self.stops:
            self._held.append(do)
        elif self.alive:
            do()

    def after(self, seconds: float, do: Do) -> Timer:
        return self.world.after(seconds, partial(self.get, do))

    def stop(self) -> None:
        self.stops += 1

    def go_on(self) -> None:
        self.stops -= 1
        held, self._held = ([], self._held) if self.stops else (self._held, [])
        for place, do in enumerate(held):
            if self.stops:
                self._held = held[place:]
                return
            self.get(do)


class Alarm:
    """Has a process do something at the earliest of the times that it is set to, and then not until it is set again."""

    def __init__(self, process: Process, do: Do) -> None:
        self._process, self._do = process, do
        self._timer: Timer | None = None
        self._at = float("inf")

    def set(self, seconds: float) -> None:
        """Ring in so many seconds, unless it rings before."""
        at = self._process.world.now + seconds
        if at >= self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at, self._timer = at, self._process.after(seconds, self._ring)

    def _ring(self) -> None:
        self._at = float("inf")
        self._do()


class Link:
    """One direction of a connection. What is sent comes in order; a cut holds it up until it is mended, as TCP does."""

    def __init__(self, world: World, latency: float, come: Callable[[Any], None]) -> None:
        """come: takes each thing that is sent, and None at the end."""
        self._world, self._latency, self._come = world, latency, come
        self._last = 0.0
        self._held: list[Any] = []
        self.cuts = 0
        self.slow = 0.0
        """Seconds that each thing takes more."""
        self.open = True
        self.why = ""
        """How the sender has ended, where its connection ends by that."""

    def send(self, thing: Any) -> None:
        if self.open:
            self._world.frames += 1
            self._pass(thing)

    def close(self, why: str = "") -> None:
        """The sender is gone: what it has sent still comes, and then the end."""
        if self.open:
            self.open, self.why = False, why
            self._pass(None)

    def vanish(self) -> None:
        """The sender's machine is gone: nothing more comes, and no end."""
        self.open = False
        self._held.clear()

    def cut(self) -> None:
        self.cuts += 1

    def mend(self) -> None:
        self.cuts -= 1
        if not self.cuts:
            held, self._held = self._held, []
            for thing in held:
                self._pass(thing)

    def delay(self, seconds: float) -> None:
        """What is sent next is late, and all after it."""
        self._last = max(self._last, self._world.now + seconds)

    def _pass(self, thing: Any) -> None:
        if self.cuts:
            self._held.append(thing)
            return
        world = self._world
        self._last = max(self._last, world.now + world.spread(self._latency) + self.slow)
        world.after(self._last - world.now, partial(self._come, thing))


def frame_link(
    world: World, speaker: Speaker, latency: float, hear: Callable[[Frame], None], end: Callable[[str], None]
) -> Link:
    """A link for frames, and for the bytes of a stranger. hear: takes each frame. end: called once at the end of the
    connection, with the reason; empty where the other side has closed it and is well."""
    parser = Parser(speaker)

    def come(frame: Frame | bytes | None) -> None:
        if frame is None:
            end(link.why)
        elif isinstance(frame, bytes) or world.exact:
            try:
                for each in parser.feed(frame if isinstance(frame, bytes) else frame.encode()):
                    hear(each)
            except DadtError as error:
                end(str(error))
        else:
            hear(Frame(frame.kind, dict(frame.header), frame.body))

    return (link := Link(world, latency, come))


class Network:
    """The ways between hosts over which data and heartbeats go, apart from control."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[tuple[int, int], int] = {}
        self.slow: dict[int, float] = {}
        """Host to the seconds that each message of it takes more."""
        self.changed: list[Do] = []
        """Called whenever a way is cut or mended."""

    def cut(self, ways: list[tuple[int, int]]) -> None:
        for way in ways:
            self._cuts[way] = self._cuts.get(way, 0) + 1
        self._tell()

    def mend(self, ways: list[tuple[int, int]]) -> None:
        for way in ways:
            self._cuts[way] -= 1
            if not self._cuts[way]:
                del self._cuts[way]
        self._tell()

    @property
    def whole(self) -> bool:
        return not self._cuts

    def reaches(self, sender: int, receiver: int) -> bool:
        return not self._cuts or not self._cuts.get((sender, receiver))

    def joined(self, one: int, other: int) -> bool:
        """Whether data go both ways."""
        return self.reaches(one, other) and self.reaches(other, one)

    def _tell(self) -> None:
        for do in list(self.changed):
            do()


def address_of(host: int) -> str:
    """The address of a host, by its number."""
    return f"10.0.{host >> 8}.{host & 255}"
