"""Deliberate faults in what ranks decide together, and in what they tell each other, each of which has to be found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dadt.algorithms.gossip import edge, gossip, pairing
from dadt.algorithms.gossip.pairing import Pairing
from dadt.comm.collectives.named import Named
from dadt.launch.members.rendezvous import KeyExchange, Rendezvous
from dadt.train.loss.reconnection import Reconnection
from simulation.comm_mail import MailGroup
from simulation.comm_wire import ByteWire, kind_of
from simulation.mutations import nothing, stays
from simulation.world import Link

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


def moves_alone(self: edge.Answering, snapshot: Any, state: Any) -> None:
    """As `Answering._average`, but only the rank that asks moves."""
    mine, theirs = snapshot.take(state.size), snapshot.take(state.size)
    self.line.receive(theirs)
    state.say(snapshot, mine)
    self.line.wait(self._send(snapshot, state, mine))
    state.number += 1


def connects_once(self: Pairing, *given: Any) -> None:
    if not self._threads:
        connect(self, *given)


connect = Pairing.connect


complete = Rendezvous._complete


def first_come(self: Rendezvous, key: str, exchange: KeyExchange, now: float) -> None:
    """As `Rendezvous._complete`, but in the order in which the values have come."""
    exchange.blobs = dict(zip(sorted(exchange.blobs), exchange.blobs.values(), strict=True))
    complete(self, key, exchange, now)


def overtakes(self: MailGroup, at: float, *given: Any) -> None:
    carry(self, at + self.world.random.random() * 0.2, *given)


carry = MailGroup._carry


def loses(self: MailGroup, at: float, *given: Any) -> None:
    if self.world.random.random() > 0.1:
        carry(self, at, *given)


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
    "the end of a connection is not noticed": ("negotiation", Link, "close", nothing),
    "nobody is told of what waits": ("negotiation", Named, "_tell", nothing),
    "a rank goes on with the neighbours that it had": ("gossip", Pairing, "connect", connects_once),
    "both ranks of a pair ask": ("gossip", pairing, "asks", lambda rank: True),
    "whoever was asked once is never asked again": ("gossip", Pairing, "_ended", nothing),
    "all neighbours are asked at once": ("gossip", Pairing, "_late_after", lambda self: -1.0),
    "one rank of a pair moves alone": ("gossip", edge.Answering, "_average", moves_alone),
    "nobody connects anew": ("gossip", Reconnection, "begin", nothing),
    "a lost rank is still waited for": ("gossip", Rendezvous, "regroup", stays),
    "an older generation is met": ("gossip", Rendezvous, "_is_outdated", lambda self, question: False),
    "values of ranks are given in the order in which they come": ("gossip", Rendezvous, "_complete", first_come),
    "those that wait for a lost rank are not told": ("gossip", Rendezvous, "refuse", nothing),
    "nobody waits for the others at the end": ("gossip", gossip, "await_all", nothing),
    "messages between two ranks overtake each other": ("gossip", MailGroup, "_carry", overtakes),
    "messages between two ranks are lost": ("gossip", MailGroup, "_carry", loses),
    "each tensor that waits orders a dump": ("negotiation", Named, "_hear", each_alone),
}
"""Each fault by what it is: the kind of simulation that finds it, what it replaces, and by what."""
