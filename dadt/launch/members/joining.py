"""Lets new hosts take the place of lost ones in a running job in which each rank trains at its own speed.

A new host takes over the ranks of a lost host and their shares of the data. Its workers join the training like other
workers that replace lost ones (dadt/launch/members/replacement.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dadt.config import Config
from dadt.control import network
from dadt.control.frame import Frame
from dadt.errors import LaunchError
from dadt.launch.actions import AskHost, Event, GiveUpHost, MoveOutput, Outbox, ReachHost, StartWorkers
from dadt.launch.ending.preemption import ranks as ranks_text
from dadt.launch.hosts.candidates import Candidates
from dadt.launch.hosts.slot import Slot, move
from dadt.launch.members.islands import with_islands
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node
from dadt.launch.start.host_report import problem_of, room, share_folder, target_of

PROBE_SECONDS = 10.0
ON_ONE_MACHINE = {network.SAME_MACHINE: 0.0}


@dataclass(slots=True)
class Arrival:
    """A host that is about to join the job."""

    place: int
    node: Node
    deadline: float
    asked: bool = False
    """Whether the other hosts were asked to try to reach this host's addresses, and to look for the marker file in its
    working folder."""
    near: bool = False
    """Whether all hosts of the job are names of one machine, so that no addresses need to be tried."""
    addresses: Sequence[Mapping[str, Any]] = ()
    """Addresses of this host that the other hosts may use."""
    reached: dict[Node, Mapping[str, float]] = field(default_factory=dict)
    """For each other host: the addresses of this host that it has reached, each with the seconds until the answer."""
    seen: list[Node] = field(default_factory=list)
    """Other hosts that see the same working folder as this host."""


@dataclass(eq=False)
class Joining:
    """Finds new hosts for a job in which lost hosts may be replaced, and lets them join."""

    _config: Config
    _nodes: list[Node]
    """The job's hosts. A new host is put into the place of a lost one in this list."""
    _slots: list[Slot]
    """Place of each worker, by rank. The places of a lost host's ranks are moved to the new host."""
    _members: Sequence[Member]
    _candidates: Candidates
    _outbox: Outbox
    _arrivals: list[Arrival] = field(default_factory=list)
    _came: set[Node] = field(default_factory=set)
    _missed: set[Node] = field(default_factory=set)
    """Nodes whose loss was already reported to `Candidates`, which then pauses the host."""
    _drained: set[str] = field(default_factory=set)
    """Names of hosts that something other than the launcher has asked to end, and which are not used again."""
    _told: set[str] = field(default_factory=set)

    def turn(self, now: float) -> None:
        """Look for new hosts that can take the places of lost ones, and continue with those that are about to join.
        Call regularly."""
        for arrival in list(self._arrivals):
            if arrival.asked and arrival.reached.keys() >= set(self._others):
                self._take(arrival, now)
            elif now >= arrival.deadline:
                self._fail(arrival, arrival.node.state, now)
        ready = [arrival for arrival in self._arrivals if arrival.node.reached]
        # New hosts join one after the other, as each must be reachable from all hosts that have joined before.
        if ready and not any(arrival.asked for arrival in ready):
            self._ask_others(ready[0], now)
        for place in self._vacant(now):
            self._begin(place, now)

    def awaits(self, node: Node) -> bool:
        """Return whether this host is about to join the job, so that `take` must handle the events from its agent."""
        return any(arrival.node is node for arrival in self._arrivals)

    def take(self, event: Event) -> None:
        """Handle an event from a host that is about to join: a frame from its agent, or the loss of the agent."""
        (arrival,) = (each for each in self._arrivals if each.node is event.node)
        if event.frame.kind == "connected":
            self._outbox.put(AskHost(event.node, arrival.place))
        elif event.frame.kind == "lost":
            self._fail(arrival, event.frame["message"], event.now)
        elif event.frame.kind == "ready":
            arrival.deadline = float("inf")
            event.node.report = event.frame.header
            if problem := problem_of(event.frame, event.node.name) or self._lack(arrival):
                self._fail(arrival, problem, event.now)

    def probed(self, event: Event) -> None:
        """Record which addresses of the new host an agent of another host could reach."""
        for arrival in [each for each in self._arrivals if each.asked]:
            near = ON_ONE_MACHINE if arrival.near else None
            if (ways := event.frame["reached"].get(str(arrival.place), near)) is not None:
                arrival.reached[event.node] = ways
                arrival.seen += [event.node] if arrival.place in event.frame.get("seen", ()) else []

    def unstarted(self, event: Event) -> bool:
        """Handle an agent's report that it could not start its workers. Returns whether its host has joined the running
        job, which then continues without it."""
        if event.node not in self._came:
            return False
        self._warn(f"{event.node.name}: {event.frame['message']}: training goes on without it")
        for rank in event.node.ranks:
            self._members[rank].ended = True
        return True

    @property
    def _others(self) -> list[Node]:
        """The nodes on which ranks train now, without those about to join."""
        coming = [arrival.node for arrival in self._arrivals]
        return [node for node in self._nodes if not node.ended and node not in coming]

    def _vacant(self, now: float) -> list[int]:
        """Return the numbers of the hosts whose agents are gone and whose ranks are all lost, so that another host can
        take their place."""
        found = []
        for place, node in enumerate(self._nodes):
            ranks = self._ranks(place)
            # An island of several hosts would need all of its ranks anew.
            whole = len(with_islands(ranks, self._slots)) == len(ranks)
            if node.ended and whole and all(self._members[rank].lost for rank in ranks):
                found.append(place)
                if node not in self._missed:
                    self._missed.add(node)
                    self._candidates.failed(node.host, now)
                    if node.told:
                        self._drained.add(node.name)
        return found

    def _ranks(self, place: int) -> list[int]:
        return [slot.rank for slot in self._slots if slot.cross_rank == place]

    def _begin(self, place: int, now: float) -> None:
        used = {node.name for node in self._nodes if not node.ended} | self._drained
        hosts = [host for host in self._candidates.usable(now) if host.name not in used]
        fitting = [host for host in hosts if not host.slots or host.slots >= len(self._ranks(place))]
        if fitting:
            node = self._nodes[place] = Node(self._nodes[place].index, fitting[0])
            self._arrivals.append(Arrival(place, node, now + self._config.start_timeout))
            self._outbox.put(ReachHost(node))

    def _lack(self, arrival: Arrival) -> str:
        """Return why this host cannot take the place of the lost host; empty if it can."""
        offer, ranks = room(arrival.node, self._config), self._ranks(arrival.place)
        if offer.places < len(ranks) or 0 < len(offer.gpus) < len(ranks):
            return f"it has no room for {len(ranks)} workers"
        if not offer.gpus and any(self._slots[rank].gpu is not None for rank in ranks):
            return "it has no GPU, as the one before had"
        if any(
            other.address == network.SAME_MACHINE and other.report["machine"] != offer.machine for other in self._others
        ):
            return "it is another machine than that of all other hosts, which have no address for it"
        return ""

    def _ask_others(self, arrival: Arrival, now: float) -> None:
        """Ask the agents of all hosts that train to look for the marker file in the new host's working folder and,
        unless all hosts are the same machine, to try to reach its addresses."""
        node, others = arrival.node, self._others
        node.state = f"not all other hosts have told within {PROBE_SECONDS:g} s to reach it"
        arrival.asked, arrival.deadline = True, now + PROBE_SECONDS
        arrival.near = any(other.address == network.SAME_MACHINE for other in others)
        targets: list[Mapping[str, Any]] = []
        if arrival.near:
            arrival.addresses = [{"address": network.SAME_MACHINE, "interface": "", "speed": 0.0}]
        else:
            families = {":" in other.address for other in others}
            allowed = network.allowed(node.report["addresses"], self._config.network_interface)
            arrival.addresses = [entry for entry in allowed if (":" in entry["address"]) in families]
            if not {"probe_port", "token"} <= node.report.keys():
                self._fail(arrival, "it does not tell where it can be tried", now)
                return
            targets.append(target_of(arrival.place, {**node.report, "addresses": arrival.addresses}))
        markers = [{**marker, "index": arrival.place}] if (marker := node.report.get("marker")) else []
        for other in others:
            self._outbox.send(other, Frame("probe", {"targets": targets, "markers": markers}))

    def _take(self, arrival: Arrival, now: float) -> None:
        """Give a new host its place in the job, once all hosts that train have reported which of its addresses they
        reach."""
        node, ways = arrival.node, [arrival.reached[other] for other in self._others]
        try:
            node.address, node.interface = network.choose(arrival.addresses, ways)
        except LaunchError as error:
            self._fail(arrival, str(error), now)
            return
        share_folder(self._nodes, node, arrival.seen)
        self._arrivals.remove(arrival)
        self._came.add(node)
        offer, ranks = room(node, self._config), self._ranks(arrival.place)
        for rank in ranks:
            self._slots[rank] = move(self._slots[rank], offer, node.address)
            self._outbox.put(MoveOutput(rank, node.name))
            self._members[rank].host = node.name
            self._members[rank].start_anew(now)
        self._candidates.served([node.host], now)
        self._outbox.say(f"{node.name} joins: new workers start there in place of {ranks_text(ranks)}")
        node.ranks, node.works = frozenset(ranks), True
        self._outbox.put(StartWorkers(node, arrival.place))

    def _fail(self, arrival: Arrival, why: str, now: float) -> None:
        self._arrivals.remove(arrival)
        self._missed.add(arrival.node)
        arrival.node.ended = True
        self._outbox.put(GiveUpHost(arrival.node))
        self._candidates.failed(arrival.node.host, now)
        self._warn(f"{arrival.node.name}: {why}: training goes on without it")

    def _warn(self, text: str) -> None:
        """Show a warning, unless the same text was shown before."""
        if text not in self._told:
            self._told.add(text)
            self._outbox.say(text, "warning")
