"""Reports when an outage of the network between two hosts begins and ends: they receive no heartbeats from each other
although both answer the launcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox
from dadt.launch.ending.failure import Blame
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node
from dadt.launch.members.rendezvous import Rendezvous

JOIN_SECONDS = 2.0
"""Seconds to wait for the other host of a pair to report the outage as well, so that one message to the user covers
both directions."""
MOST_TOLD = 16
"""In a job of at most this many ranks, a rank that waits receives the state of all other ranks; in a larger job, only
that of some."""
ORDER_SECONDS = 0.5
"""Minimum seconds between two selections of the ranks whose state is sent to waiting ranks, in a job of more than
MOST_TOLD ranks."""
ANSWER_SECONDS = 3.0
"""Seconds of silence after which an agent counts as not answering; a healthy agent sends a frame twice a second."""


@dataclass(slots=True)
class Outage:
    """An outage of the network between two hosts."""

    since: float
    """Time (time.monotonic) at which the last heartbeat between the two hosts arrived."""
    noticed: float
    deaf: set[int] = field(default_factory=set)
    """The numbers of those of the two hosts that receive no heartbeats from the other one."""
    told: bool = False


@dataclass(eq=False)
class Silences:
    """Tracks outages of the network between all pairs of hosts, and answers ranks that ask about the state of the
    others."""

    _nodes: Sequence[Node]
    _slots: Sequence[Slot]
    _rendezvous: Rendezvous
    _outbox: Outbox
    _verbose: bool = False
    """Whether to report also pairs of hosts between which no heartbeat has ever arrived."""
    _ports: dict[int, int] = field(default_factory=dict)
    """Port at which each host receives heartbeats, by the host's number; 0 if it receives none."""
    _announced: dict[int, Node] = field(default_factory=dict)
    """The node that has reported its port for heartbeats, by the host's number."""
    _outages: dict[tuple[int, int], Outage] = field(default_factory=dict)
    _unheard: dict[tuple[int, int], float] = field(default_factory=dict)
    """For each host that has never received a heartbeat from another host, by their numbers: the time
    (time.monotonic) since which it could have."""
    _told_first: Sequence[int] = ()
    """In a job of more than MOST_TOLD ranks: the ranks whose state is sent to ranks that wait."""
    _ordered: float = float("-inf")
    """Time (time.monotonic) at which the ranks in `_told_first` were selected."""

    def heartbeat(self, event: Event) -> None:
        """Record the port at which a host receives heartbeats (0: none). Once all ports are known, and again after a
        host was replaced, all agents are sent the list of hosts with their ports. Hosts whose port is not known yet are
        left out."""
        host = self._nodes.index(event.node)
        self._ports[host], self._announced[host] = event.frame["port"], event.node
        self._outages = {pair: outage for pair, outage in self._outages.items() if host not in pair}
        self._unheard = {pair: since for pair, since in self._unheard.items() if host not in pair}
        if len(self._ports) == len(self._nodes):
            hosts = [
                {"index": index, "address": self._nodes[index].address, "port": port}
                for index, port in self._ports.items()
                if port and self._announced[index] is self._nodes[index]
            ]
            self._outbox.send_all(Frame("heartbeat", {"hosts": hosts}))

    def unheard(self, event: Event) -> None:
        """Handle an agent's report that its host has never received a heartbeat from another host, and tell the user if
        verbose output is on."""
        if self._is_outdated(event):
            return
        self._unheard[self._nodes.index(event.node), event.frame["peer"]] = event.now - event.frame["seconds"]
        if self._verbose:
            there = self._nodes[event.frame["peer"]]
            self._outbox.say(
                f"{event.node.name} hears no UDP from {there.name} at {there.address}, as where a firewall "
                "lets none through: silence between them will not be noticed"
            )

    def silent(self, event: Event) -> None:
        """Record that a host has received no heartbeat from another host for some seconds."""
        if self._is_outdated(event):
            return
        listener = self._nodes.index(event.node)
        pair = _pair(listener, event.frame["peer"])
        self._outages.setdefault(pair, Outage(event.now - event.frame["seconds"], event.now)).deaf.add(listener)

    def heard(self, event: Event) -> None:
        """Record that a host receives heartbeats from another host again, or for the first time."""
        if self._is_outdated(event):
            return
        listener = self._nodes.index(event.node)
        self._unheard.pop((listener, event.frame["peer"]), None)
        pair = _pair(listener, event.frame["peer"])
        outage = self._outages.get(pair)
        if outage is None:
            return
        outage.deaf.discard(listener)
        if not outage.deaf:
            del self._outages[pair]
            if outage.told:
                first, second = (self._nodes[index].name for index in pair)
                seconds = event.now - outage.since
                self._tell(f"{first} and {second} hear each other again, after {seconds:.0f} s", "info")

    def _is_outdated(self, event: Event) -> bool:
        """Return whether an agent's report is about a host whose place in the job another host has taken since."""
        port = event.frame["port"]
        return bool(port != self._ports.get(event.frame["peer"], port))

    def peers(self, question: Event) -> None:
        """Answer a rank's question about the state of the other ranks, and record that the rank waits for them."""
        rank, now = question.frame["rank"], question.now
        self._rendezvous.members[rank].waiting.ask(question.frame.get("starts", False), now)
        here = self._slots[rank].cross_rank
        peers = [self._seen_from(here, member, now) for member in self._worth_telling(here, now)]
        self._outbox.reply(question)(Frame("peers", {"peers": peers}), now)

    def _worth_telling(self, here: int, now: float) -> Sequence[Member]:
        """Return the ranks whose state is sent to a waiting rank of this host. In a large job, in which thousands of
        ranks ask every few seconds, these are some ranks that have ended, some for which the others wait, and some
        whose hosts' heartbeats this host does not receive."""
        present = self._rendezvous.present
        if len(present) <= MOST_TOLD:
            return present
        if now - self._ordered >= ORDER_SECONDS:
            self._ordered, self._told_first = now, first_to_tell(present, now)
        deaf = {place for pair in self._current if here in pair for place in pair if place != here}
        cut = sorted(rank for place in deaf for rank in self._nodes[place].ranks)[:MOST_TOLD]
        return [self._rendezvous.members[rank] for rank in sorted({*self._told_first, *cut})]

    def _seen_from(self, host: int, member: Member, now: float) -> dict[str, Any]:
        told = {**member.describe(now), "said": member.state, "gathered": member.gathered}
        text = self.between(host, self._slots[member.rank].cross_rank, now)
        return {**told, "state": f"is unreachable, as {text} ({told['state']})"} if text and not member.ended else told

    def turn(self, now: float) -> None:
        """Report new outages to the user, once both hosts have had time to notice them. If an agent does not answer,
        forget the conditions of its ranks, which may be out of date. Call regularly."""
        for index, node in enumerate(self._nodes):
            if not self._answers(index, now):
                for rank in node.ranks:
                    self._rendezvous.members[rank].condition = ""
        for pair, outage in self._current.items():
            joined = len(outage.deaf) == 2 or now - outage.noticed >= JOIN_SECONDS
            if joined and not outage.told and all(self._answers(index, now) for index in pair):
                outage.told = True
                self._tell(f"{self._text(pair, outage, now)}; {_BOTH}", "warning")

    def between(self, one: int, other: int, now: float) -> str:
        """Return a text about the outage between these two hosts; empty if there is none."""
        outage = self._current.get(_pair(one, other))
        return self._text(_pair(one, other), outage, now) if outage is not None else ""

    def hear(self, lost: Collection[int], now: float) -> bool:
        """Return whether new workers of these lost ranks could reach those that train: their hosts and those of all
        others hear each other, or are gone."""
        here = [member.rank for member in self._rendezvous.members if not (member.lost or member.ended)]
        places = {self._slots[rank].cross_rank for rank in here}
        for own in {self._slots[rank].cross_rank for rank in lost}:
            if any(self.between(own, place, now) for place in places - {own}) and not self._nodes[own].ended:
                return False
        return True

    def blame(self, now: float) -> Blame | None:
        """Return a Blame for a failure that names the longest outage between hosts which answer the launcher; None if
        there is no outage."""
        found = {p: o for p, o in self._current.items() if all(self._answers(index, now) for index in p)}
        pair = min(found, key=lambda pair: found[pair].since, default=None)
        if pair is None:
            return None
        first, second = (self._nodes[index].name for index in pair)
        return Blame(f"the way between {first} and {second} failed", f"{self._text(pair, found[pair], now)}; {_BOTH}")

    def cut_off(self, places: Collection[int], since: float, now: float) -> tuple[int, str] | None:
        """Return the number of that host among `places` which is part of the most outages that began before `since`
        (time.monotonic), and a text about one of them. If several have as many, the one with the highest number is
        returned. If there are no such outages, hosts count whose heartbeats others have never received. None if there
        are no such hosts either."""
        for outages in (self._current, self._never_heard(places)):
            found = {pair: outage for pair, outage in outages.items() if outage.since < since}
            if (cut := self._most_cut(found, places, now)) is not None:
                return cut
        return None

    def known_cut(self, places: Collection[int], now: float) -> tuple[int, str] | None:
        """Return the same of all outages, however short, but only between hosts that have received heartbeats from each
        other."""
        return self._most_cut(self._current, places, now)

    def _most_cut(
        self, outages: Mapping[tuple[int, int], Outage], places: Collection[int], now: float
    ) -> tuple[int, str] | None:
        found = {pair: outage for pair, outage in outages.items() if set(pair) <= set(places)}
        counts = Counter(place for pair in found for place in pair)
        if not counts:
            return None
        place = max(counts, key=lambda place: (counts[place], place))
        pair = next(pair for pair in found if place in pair)
        return place, f"{self._nodes[place].name}: {self._text(pair, found[pair], now)}"

    def _never_heard(self, places: Collection[int]) -> Mapping[tuple[int, int], Outage]:
        """Return an outage for each pair of `places` of which one has never received a heartbeat from the other,
        although it receives those of most of them, so that no firewall in front of it rejects them all."""
        unheard = {pair: since for pair, since in self._unheard.items() if set(pair) <= set(places)}
        missed = Counter(listener for listener, _ in unheard)
        found = dict[tuple[int, int], Outage]()
        for (listener, other), since in unheard.items():
            if 2 * missed[listener] < len(places):
                found.setdefault(_pair(listener, other), Outage(since, since)).deaf.add(listener)
        return found

    @property
    def _current(self) -> dict[tuple[int, int], Outage]:
        """The outages, without those of lost hosts whose place another host is about to take."""
        nodes = self._nodes
        if not self._outages:
            return {}
        away = {index for index, node in self._announced.items() if nodes[index] is not node}
        return {pair: outage for pair, outage in self._outages.items() if away.isdisjoint(pair)}

    def _text(self, pair: tuple[int, int], outage: Outage, now: float) -> str:
        first, second = (self._nodes[index] for index in pair)
        seconds = now - outage.since
        if len(outage.deaf) == 2:
            ways = f"{_way(first)} and {_way(second)}"
            return f"{first.name} and {second.name} have heard nothing from each other over {ways} for {seconds:.0f} s"
        listener, other = (first, second) if pair[0] in outage.deaf else (second, first)
        return f"{listener.name} has heard nothing from {other.name} over {_way(other)} for {seconds:.0f} s"

    def _answers(self, index: int, now: float) -> bool:
        node = self._nodes[index]
        return not node.ended and now - node.heard < ANSWER_SECONDS

    def _tell(self, text: str, level: str) -> None:
        self._outbox.say(text, level)
        self._outbox.note("link", text=text)


def first_to_tell(members: Sequence[Member], now: float) -> list[int]:
    """Return those ranks of a large job whose state matters most to waiting ranks: some that have ended, and some for
    which other ranks wait."""

    def order(member: Member) -> tuple[bool, bool, int, int]:
        return not member.held, member.waits(now), member.step, member.rank

    over = [member for member in members if member.ended or member.finished]
    others = [member for member in members if not (member.ended or member.finished)]
    first = [*nsmallest(MOST_TOLD // 2, over, order), *nsmallest(MOST_TOLD // 2, others, order)]
    return [member.rank for member in first]


_BOTH = "both still answer the launcher, but no heartbeat comes through between them"


def _way(node: Node) -> str:
    return f"{node.address} ({node.interface})" if node.interface else node.address


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
