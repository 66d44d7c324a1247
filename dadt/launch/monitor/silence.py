"""Which hosts hear nothing of each other although both answer the launcher: told once, and once it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dadt.control.frame import Frame
from dadt.launch.agents import Node
from dadt.launch.failure import Blame
from dadt.launch.monitor.journal import Journal

JOIN_SECONDS = 2.0
"""How long the other side may take to tell the same: one line tells of both."""
ANSWER_SECONDS = 3.0
"""An agent that has told nothing for so long does not answer; it tells something twice a second."""


@dataclass(slots=True)
class Outage:
    """Between two hosts."""

    since: float
    """time.monotonic, when the last sign came through."""
    noticed: float
    deaf: set[int] = field(default_factory=set)
    """Those of the two that hear nothing of the other."""
    told: bool = False


class Silences:
    """Of all pairs of hosts."""

    def __init__(
        self, nodes: Sequence[Node], say: Callable[[str, str], None], journal: Journal, *, verbose: bool = False
    ) -> None:
        """verbose: tell of what cannot be listened to, too."""
        self._nodes = nodes
        self._verbose = verbose
        self._ports: dict[int, int] = {}
        """Where each host listens for the others' heartbeats."""
        self._say = say
        self._journal = journal
        self._outages: dict[tuple[int, int], Outage] = {}

    def listens(self, host: int, port: int) -> Frame | None:
        """It does at this port; 0: at none. Returns what all agents are to know, once all have told."""
        self._ports[host] = port
        if len(self._ports) < len(self._nodes):
            return None
        hosts = [
            {"index": index, "address": self._nodes[index].address, "port": port}
            for index, port in self._ports.items()
            if port
        ]
        return Frame("heartbeat", {"hosts": hosts})

    def unheard(self, listener: int, other: int) -> None:
        """Nothing has come from the other one from the beginning on."""
        if self._verbose:
            there = self._nodes[other]
            self._say(
                f"{self._nodes[listener].name} hears no UDP from {there.name} at {there.address}, as where a firewall "
                "lets none through: silence between them will not be noticed",
                "info",
            )

    def silent(self, listener: int, other: int, seconds: float) -> None:
        """One host has heard nothing from the other for so long."""
        now = time.monotonic()
        outage = self._outages.setdefault(_pair(listener, other), Outage(now - seconds, now))
        outage.deaf.add(listener)

    def heard(self, listener: int, other: int) -> None:
        """It has heard it again."""
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
        """Tell what has been noticed, once both sides have had the time to tell it."""
        now = time.monotonic()
        for pair, outage in self._outages.items():
            joined = len(outage.deaf) == 2 or now - outage.noticed >= JOIN_SECONDS
            if joined and not outage.told and all(self._answers(index) for index in pair):
                outage.told = True
                self._tell(f"{self._text(pair, outage)}; {_BOTH}", "warning")

    def between(self, one: int, other: int) -> str:
        """What is to be said of the way between these hosts; empty if nothing is."""
        outage = self._outages.get(_pair(one, other))
        return self._text(_pair(one, other), outage) if outage is not None else ""

    def blame(self) -> Blame | None:
        """The longest outage, among hosts that answer."""
        found = {p: o for p, o in self._outages.items() if all(map(self._answers, p))}
        pair = min(found, key=lambda pair: found[pair].since, default=None)
        if pair is None:
            return None
        first, second = (self._nodes[index].name for index in pair)
        return Blame(f"the way between {first} and {second} failed", f"{self._text(pair, found[pair])}; {_BOTH}")

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


_BOTH = "both still answer the launcher: the way between them carries control but no data"


def _way(node: Node) -> str:
    return f"{node.address} ({node.interface})" if node.interface else node.address


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
