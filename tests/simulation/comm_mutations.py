"""Deliberate faults in what ranks decide together, and in what they tell each other, each of which has to be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from dadt.comm.collectives.named import Named
from simulation.comm_wire import ByteWire, kind_of
from simulation.mutations import nothing

put = ByteWire.put


def changed(kind: str, change: Callable[[ByteWire, bytes], list[bytes]]) -> Callable[[ByteWire, bytes], None]:
    """A way that changes each message of one kind."""

    def changing(self: ByteWire, data: bytes) -> None:
        for each in change(self, data) if kind_of(data) == kind else [data]:
            put(self, each)

    return changing


def held(self: ByteWire, message: bytes) -> list[bytes]:
    """The first report waits for the second."""
    return [] if self.messages == 1 else [message, self.sent[0]] if self.messages == 2 else [message]


def cut_names(self: ByteWire, message: bytes) -> list[bytes]:
    """Of each name the last letter is another one."""
    return [message.replace(b"\2t1", b"\2t2")]


def each_alone(self: Named, notices: Any) -> None:
    for notice in notices:
        hear(self, [notice])


hear = Named._hear

COMM_MUTATIONS: Mapping[str, tuple[str, Any, str, Any]] = {
    "a report is lost": ("negotiation", ByteWire, "put", changed("report", lambda wire, m: [m][wire.messages == 2 :])),
    "a report comes twice": ("negotiation", ByteWire, "put", changed("report", lambda wire, m: [m, m])),
    "reports overtake each other": ("negotiation", ByteWire, "put", changed("report", held)),
    "a report names another tensor": ("negotiation", ByteWire, "put", changed("report", cut_names)),
    "a decision is lost": (
        "negotiation",
        ByteWire,
        "put",
        changed("decision", lambda wire, m: [m][wire.messages == 2 :]),
    ),
    "a decision comes twice": ("negotiation", ByteWire, "put", changed("decision", lambda wire, m: [m, m])),
    "nobody hears why a rank gives up": ("negotiation", ByteWire, "put", changed("giving up", lambda wire, m: [])),
    "nobody hears a goodbye": ("negotiation", ByteWire, "put", changed("goodbye", lambda wire, m: [])),
    "the end of a connection is not noticed": ("negotiation", ByteWire, "close", nothing),
    "nobody is told of what waits": ("negotiation", Named, "_tell", nothing),
    "each tensor that waits orders a dump": ("negotiation", Named, "_hear", each_alone),
}
"""Each fault by what it is: the kind of simulation that finds it, what it replaces, and by what."""


@contextmanager
def comm_mutated(name: str) -> Iterator[str]:
    """Ranks decide with this fault. Gives the kind of simulation that has to find it."""
    kind, where, what, other = COMM_MUTATIONS[name]
    with patch.object(where, what, other):
        yield kind
