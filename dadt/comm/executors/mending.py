"""Replaces TCP connections between two ranks that break while both ranks are alive."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol
from weakref import WeakSet

from dadt.control import connection, pacing
from dadt.control.connection import Listener, Reach, Refused, SealedConnection, Unreached, Words
from dadt.control.priority import set_urgent

MENDED = "mended"
"""Value of `use` in the greeting of a connection that replaces a broken one."""
BROKEN = "broken"
"""Value of `use` in the greeting by which a rank asks another one to dial it again."""
USES = (MENDED, BROKEN)
_DATA = 2
"""Number of the first data connection between two ranks, after those for notices and for messages."""
_PAUSE = 0.1
"""Seconds between two attempts to connect, because no event reports when the other rank can be reached again."""

_listeners: WeakSet[Listener] = WeakSet()


def _forget() -> None:
    for each in _listeners:
        each.forget()


# A forked child that keeps a listening socket open would make a dead rank look alive.
os.register_at_fork(after_in_child=_forget)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


class Lasting(Protocol):
    """Connections with other ranks that can be replaced when they break, over which go one or more streams of bytes
    that continue where they were. The methods are described in `_core.TcpExecutor`."""

    def await_break(self) -> int | None: ...

    def detach(self, rank: int) -> Sequence[int] | None: ...

    def is_detached(self, rank: int) -> bool: ...

    def has_left(self, rank: int) -> bool: ...

    def attach(self, rank: int, sockets: Sequence[int], received: Sequence[int]) -> bool: ...

    def give_up(self, rank: int) -> None: ...


@dataclass(slots=True)
class _Coming:
    """The connections that have arrived so far in another rank's attempt to replace the broken ones."""

    received: list[int]
    deadline: float
    greeted: set[int] = field(default_factory=set)
    sockets: dict[int, socket.socket] = field(default_factory=dict)


class Mender:
    """Replaces the broken connections of an executor, or of named tensors, until these are closed or aborted. All
    connections between two ranks are replaced together; the rank with the higher index in the group dials, as at the
    start. Each side reports how many bytes of each stream it has received, so that the other one continues from
    there."""

    def __init__(
        self, own: int, name: str, ranks: Sequence[int], reaches: Sequence[Reach], listener: Listener, seconds: float
    ) -> None:
        """own: this rank's index in `ranks`. name: the group's name. reaches: where each rank listens. seconds: how
        long to try before a rank counts as gone."""
        self._own, self._name, self._ranks, self._reaches = own, name, ranks, reaches
        self._listener, self._seconds = listener, seconds
        _listeners.add(listener)
        self._lasting: Lasting | None = None
        self._counts: Sequence[int] = ()
        self._silence, self._rate = 0.0, 0.0
        self._lock = threading.Lock()
        self._mending: set[int] = set()
        """Indices of the ranks whose connections a thread is replacing."""
        self._attempts = [0] * len(ranks)
        """Number of the latest attempt to connect with each rank, counted by whichever of the two ranks dials."""
        self._coming: dict[int, _Coming] = {}
        """Connections that have arrived in each rank's latest attempt, by the rank's index, until all have arrived."""
        self._attaching: set[int] = set()
        """Indices of the ranks with which an attempt is complete, and whose connections are being replaced. Meanwhile
        no later attempt begins, as it would be told a position in the streams that is about to change."""
        self._ended = threading.Event()

    def start(self, lasting: Lasting, counts: Sequence[int], silence: float, rate: float) -> None:
        """counts: number of connections with each rank. silence: seconds for `connection.guard`. rate: limit for
        `pacing.pace`; 0: no limit."""
        self._lasting, self._counts, self._silence, self._rate = lasting, counts, silence, rate
        threading.Thread(target=self._run, args=(lasting,), name="dadt-tcp-mend", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()
        with self._lock:
            for place in list(self._coming):
                self._drop(place)

    def _run(self, lasting: Lasting) -> None:
        while (place := lasting.await_break()) is not None:
            self._begin(lasting, place)
        self.close()

    def _begin(self, lasting: Lasting, place: int) -> None:
        with self._lock:
            if place not in self._mending:
                self._mending.add(place)
                threading.Thread(target=self._mend, args=(lasting, place), name="dadt-tcp-mend", daemon=True).start()

    def _mend(self, lasting: Lasting, place: int) -> None:
        deadline = monotonic() + self._seconds
        dial = self._dial if self._own > place else self._ask
        while True:
            with self._lock:
                if self._ended.is_set() or not lasting.is_detached(place):
                    self._mending.discard(place)
                    return
            try:
                if dial(lasting, place):
                    deadline = monotonic() + self._seconds
                    continue
            except Unreached as error:
                if error.nobody_listens and lasting.has_left(place):  # the other rank's process has ended
                    deadline = 0.0
            except Refused:
                pass  # refused: the other rank has ended, or has seen a later attempt
            if monotonic() >= deadline:
                lasting.give_up(place)
            else:
                self._ended.wait(_PAUSE)

    def _dial(self, lasting: Lasting, place: int) -> bool:
        """Dial a rank. Returns whether its connections are replaced."""
        received = lasting.detach(place)
        if received is None:
            return False
        self._attempts[place] += 1
        hello = self._hello(MENDED, place) | {"received": list(received)}
        with ExitStack() as opened:
            sockets = []
            for number in range(self._counts[place]):
                found, answer = self._reach(place, {**hello, "number": number})
                sockets.append(opened.enter_context(found.socket))
            if not _are_counts(answer.get("received")) or len(answer["received"]) != len(received):
                raise Refused("this is no answer of this version")
            return self._attach(lasting, place, sockets, answer["received"])

    def _ask(self, lasting: Lasting, place: int) -> bool:
        """Ask a rank that has not noticed the break to dial this rank."""
        with self._lock:
            coming = self._coming.get(place)
            hello = self._hello(BROKEN, place)
        if coming is None or monotonic() >= coming.deadline:
            self._reach(place, hello)[0].socket.close()
        return False

    def _hello(self, use: str, place: int) -> dict[str, object]:
        return {"use": use, "group": self._name, "place": self._own, "attempt": self._attempts[place]}

    def _reach(self, place: int, hello: Words) -> tuple[SealedConnection, Words]:
        deadline = monotonic() + connection.CONNECT_SECONDS
        found, answer, _ = connection.attempt(self._reaches[place], hello, deadline, f"rank {self._ranks[place]}")
        return found, answer

    def _attach(self, lasting: Lasting, place: int, sockets: Sequence[socket.socket], received: list[int]) -> bool:
        for number, each in enumerate(sockets):
            connection.guard(each, self._silence)
            set_urgent(each, number < _DATA)
            if self._rate:
                pacing.pace(each, self._rate)
        attached = lasting.attach(place, [each.fileno() for each in sockets], received)
        if not attached and lasting.is_detached(place):  # this rank no longer has the bytes that the other rank lacks
            lasting.give_up(place)
        return attached

    # Where another rank dials this one -------------------------------------------------------------------------

    def greet(self, hello: Words) -> Words:
        place, attempt, number = (hello.get(word, 0) for word in ("place", "attempt", "number"))
        received = hello.get("received", [])
        sound = all(map(_is_count, (place, attempt, number))) and _are_counts(received)
        lasting = self._lasting
        if lasting is None or hello.get("group") != self._name or not sound or place >= len(self._ranks):
            return {"refused": "there is no such connection"}
        if hello["use"] == BROKEN:
            with self._lock:
                asks = place < self._own and attempt == self._attempts[place]
                if asks and lasting.detach(place) is None:
                    return {"refused": "this rank has ended"}
            if asks:
                self._begin(lasting, place)
            return {}
        if place <= self._own or number >= self._counts[place]:
            return {"refused": "there is no such connection"}
        with self._lock:
            if attempt < self._attempts[place] or attempt == 0 or place in self._attaching:
                return {"refused": "this is an earlier attempt"}
            mine = lasting.detach(place)
            if mine is None or len(mine) != len(received):
                return {"refused": "this rank has ended"}
            if attempt > self._attempts[place]:
                self._attempts[place] = attempt
                self._drop(place)
                self._coming[place] = _Coming(received, monotonic() + connection.MEET_SECONDS)
            coming = self._coming.get(place)
            if coming is None or number in coming.greeted or received != coming.received:
                return {"refused": "there is such a connection"}
            coming.greeted.add(number)
        return {"received": list(mine)}

    def take(self, hello: Words, found: SealedConnection) -> None:
        place, lasting = hello["place"], self._lasting
        with self._lock:
            coming = self._coming.get(place)
            if lasting is None or coming is None or hello["use"] == BROKEN or hello["attempt"] < self._attempts[place]:
                found.socket.close()
                return
            coming.sockets[hello["number"]] = found.socket
            if len(coming.sockets) < self._counts[place]:
                return
            del self._coming[place]
            self._attaching.add(place)
        try:
            with ExitStack() as opened:
                sockets = [opened.enter_context(coming.sockets[number]) for number in sorted(coming.sockets)]
                self._attach(lasting, place, sockets, coming.received)
        finally:
            with self._lock:
                self._attaching.discard(place)

    def _drop(self, place: int) -> None:
        coming = self._coming.pop(place, None)
        for each in coming.sockets.values() if coming else ():
            each.close()
