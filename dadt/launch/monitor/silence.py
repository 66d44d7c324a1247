"""Hosts that hear nothing from each other although both answer the launcher; reported at its begin and its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.agents import Node
from dadt.launch.failure import Blame
from dadt.launch.monitor.journal import Journal

JOIN_SECONDS = 2.0
"""How long the other side may take to report the same, so that one line covers both."""
ANSWER_SECONDS = 3.0
"""An agent that was silent for this long does not answer: it sends something twice a second."""


@dataclass(slots=True)
class Outage:
    """An outage between two hosts."""

    since: float
    """Time (time.monotonic) at which the last heartbeat came through."""
    noticed: float
    deaf: set[int] = field(default_factory=set)
    """The hosts of the two that hear nothing from the other."""
    told: bool = False


class Silences:
    """The outages between all pairs of hosts."""

    def __init__(
        self, nodes: Sequence[Node], say: Callable[[str, str], None], journal: Journal, *, verbose: bool = False
    ) -> None:
        """verbose: also report pairs between which no heartbeat ever came through."""
        self._nodes = nodes
        self._verbose = verbose
        self._ports: dict[int, int] = {}
        """Host to the port at which it listens for heartbeats; 0: none."""
        self._say = say
        self._journal = journal
        self._outages: dict[tuple[int, int], Outage] = {}

    def hear(self, host: int, frame: Frame) -> Frame | None:
        """Record what an agent reports of heartbeats. Returns a frame for all agents; None where there is nothing to
        send."""
        if frame.kind == "heartbeat":
            return self.listens(host, frame["port"])
        if frame.kind == "silent":
            self.silent(host, frame["peer"], frame["seconds"])
        elif frame.kind == "heard":
            self.heard(host, frame["peer"])
        else:
            self.unheard(host, frame["peer"])
        return None

    def listens(self, host: int, port: int) -> Frame | None:
        """Record the port at which a host listens; 0: none. Once all are known, returns the frame for all agents, and
        again when another host has come in the place of one."""
        self._ports[host] = port
        self._outages = {pair: outage for pair, outage in self._outages.items() if host not in pair}
        if len(self._ports) < len(self._nodes):
            return None
        hosts = [
            {"index": index, "address": self._nodes[index].address, "port": port}
            for index, port in self._ports.items()
            if port
        ]
        return Frame("heartbeat", {"hosts": hosts})

    def unheard(self, listener: int, other: int) -> None:
        """Record that no heartbeat has ever come from the other host."""
        if self._verbose:
            there = self._nodes[other]
            self._say(
                f"{self._nodes[listener].name} hears no UDP from {there.name} at {there.address}, as where a firewall "
                "lets none through: silence between them will not be noticed",
                "info",
            )

    def silent(self, listener: int, other: int, seconds: float) -> None:
        """Record that a host has heard nothing from the other for this many seconds."""
        now = time.monotonic()
        outage = self._outages.setdefault(_pair(listener, other), Outage(now - seconds, now))
        outage.deaf.add(listener)

    def heard(self, listener: int, other: int) -> None:
        """Record that a host hears the other one again."""
        outage = self._outages.get(_pair(listener, other))
        if outage is None:
            return
        outage.deaf.discard(listener)
        if not outage.deaf:
            del self._outages[_pair(listener, other)]
            if outage.told:
                first, second = (self._nodes[index].name for index in _pair(listener, other))
                seconds = time.monotonic() - outage.since
                self._tell(f"{first} and {second} hear each other again, after {seconds:.0f} s", "info")

    def turn(self) -> None:
        """Report new outages, once both sides have had the time to notice them."""
        now = time.monotonic()
        for pair, outage in self._outages.items():
            joined = len(outage.deaf) == 2 or now - outage.noticed >= JOIN_SECONDS
            if joined and not outage.told and all(self._answers(index) for index in pair):
                outage.told = True
                self._tell(f"{self._text(pair, outage)}; {_BOTH}", "warning")

    def between(self, one: int, other: int) -> str:
        """A text about the outage between these hosts; empty if there is none."""
        outage = self._outages.get(_pair(one, other))
        return self._text(_pair(one, other), outage) if outage is not None else ""

    def blame(self) -> Blame | None:
        """The blame for the longest outage between hosts that answer the launcher; None if there is none."""
        found = {p: o for p, o in self._outages.items() if all(map(self._answers, p))}
        pair = min(found, key=lambda pair: found[pair].since, default=None)
        if pair is None:
            return None
        first, second = (self._nodes[index].name for index in pair)
        return Blame(f"the way between {first} and {second} failed", f"{self._text(pair, found[pair])}; {_BOTH}")

    def cut_off(self, places: Collection[int], since: float) -> tuple[int, str] | None:
        """The place, of these, of the host with the most outages that began before `since` (time.monotonic), the
        highest of equal ones; and a text that says why. None where there are none."""
        found = {p: o for p, o in self._outages.items() if o.since < since and set(p) <= set(places)}
        counts = Counter(place for pair in found for place in pair)
        if not counts:
            return None
        place = max(counts, key=lambda place: (counts[place], place))
        pair = next(pair for pair in found if place in pair)
        return place, f"{self._nodes[place].name}: {self._text(pair, found[pair])}"

    def _text(self, pair: tuple[int, int], outage: Outage) -> str:
        first, second = (self._nodes[index] for index in pair)
        seconds = time.monotonic() - outage.since
        if len(outage.deaf) == 2:
            ways = f"{_way(first)} and {_way(second)}"
            return f"{first.name} and {second.name} have heard nothing from each other over {ways} for {seconds:.0f} s"
        listener, other = (first, second) if pair[0] in outage.deaf else (second, first)
        return f"{listener.name} has heard nothing from {other.name} over {_way(other)} for {seconds:.0f} s"

    def _answers(self, index: int) -> bool:
        node = self._nodes[index]
        return not node.ended and time.monotonic() - node.heard < ANSWER_SECONDS

    def _tell(self, text: str, level: str) -> None:
        self._say(text, level)
        self._journal.write("link", text=text)


_BOTH = "both still answer the launcher, but no heartbeat comes through between them"


def _way(node: Node) -> str:
    return f"{node.address} ({node.interface})" if node.interface else node.address


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
