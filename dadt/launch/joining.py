"""Hosts come into a running job in the place of lost ones, where each rank trains at its own speed.

A host takes over the place of another: its ranks and their shares of the data. Its workers join as others do that were
lost (dadt/launch/replacement.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dadt.control import network
from dadt.control.frame import Frame
from dadt.errors import LaunchError
from dadt.launch.agents import Agents, Node
from dadt.launch.hosts.discovery import Discovery
from dadt.launch.hosts.slot import move
from dadt.launch.monitor.members import Member
from dadt.launch.monitor.output import Output
from dadt.launch.order import order_to_join
from dadt.launch.placed import Placed, room
from dadt.launch.preemption import ranks as ranks_text
from dadt.launch.startup import problem_of, share_folder, target_of

PROBE_SECONDS = 10.0
ON_ONE_MACHINE = {network.SAME_MACHINE: 0.0}


@dataclass(slots=True)
class Attempt:
    """A host that is about to come."""

    place: int
    node: Node
    deadline: float
    asked: bool = False
    """Whether the other hosts were asked to try its addresses, and to look for its working folder."""
    near: bool = False
    """Whether all hosts are one machine, so that no address needs to be tried."""
    addresses: Sequence[Mapping[str, Any]] = ()
    """Its addresses that the other hosts may use."""
    reached: dict[Node, Mapping[str, float]] = field(default_factory=dict)
    """Its addresses that other hosts have reached, each with the seconds it took."""
    seen: list[Node] = field(default_factory=list)
    """The other hosts that see its working folder."""


class Joining:
    """One per job, for the launcher's thread. Never blocks."""

    def __init__(
        self,
        where: Placed,
        agents: Agents,
        members: Sequence[Member],
        output: Output,
        discovery: Discovery,
        look: Callable[[Node], Mapping[str, Any]],
        start: Callable[[Node, Sequence[int], Frame], None],
        say: Callable[[str, str], None],
    ) -> None:
        """look: the fields of the frame that asks an agent about its host. start: has a node start the workers of these
        ranks, by this order."""
        self._where = where
        self._agents = agents
        self._members = members
        self._output = output
        self._discovery = discovery
        self._look = look
        self._start = start
        self._say = say
        self._attempts: list[Attempt] = []
        self._came: set[Node] = set()
        self._missed: set[Node] = set()
        """Lost nodes that the discovery already knows of."""
        self._drained: set[str] = set()
        """Names of hosts that were asked to end from outside, which are not to be used again."""
        self._told: set[str] = set()

    def turn(self) -> None:
        """Call it as time passes, while lost places may be taken."""
        self._discovery.poll()
        for attempt in list(self._attempts):
            if attempt.asked and attempt.reached.keys() >= set(self._others):
                self._take(attempt)
            elif time.monotonic() >= attempt.deadline:
                self._fail(attempt, attempt.node.state)
        ready = [attempt for attempt in self._attempts if attempt.node.reached]
        if ready and not any(attempt.asked for attempt in ready):  # one after the other, as each is to reach the next
            self._ask_others(ready[0])
        for place in self._vacant():
            self._begin(place)

    def takes(self, node: Node, frame: Frame) -> bool:
        """Whether a frame is about a host that is about to come."""
        if frame.kind == "probed":
            for attempt in [each for each in self._attempts if each.asked]:
                near = ON_ONE_MACHINE if attempt.near else None
                if (ways := frame["reached"].get(str(attempt.place), near)) is not None:
                    attempt.reached[node] = ways
                    attempt.seen += [node] if attempt.place in frame.get("seen", ()) else []
            return True
        if frame.kind == "unstarted" and node in self._came:
            self._warn(f"{node.name}: {frame['message']}: training goes on without it")
            for rank in node.ranks:
                self._members[rank].ended = True
            return True
        mine = [each for each in self._attempts if each.node is node]
        if not mine:
            return False
        (attempt,) = mine
        if frame.kind == "connected":
            told = {**self._look(node), "index": attempt.place, "hosts": len(self._agents.nodes)}
            self._agents.send(node, Frame("look", told))
        elif frame.kind == "lost":
            self._fail(attempt, frame["message"])
        elif frame.kind == "ready":
            attempt.deadline = float("inf")
            node.report = frame.header
            if problem := problem_of(frame, node.name) or self._lack(attempt):
                self._fail(attempt, problem)
        return True

    @property
    def _others(self) -> list[Node]:
        """The hosts that train."""
        coming = [attempt.node for attempt in self._attempts]
        return [node for node in self._agents.nodes if not node.ended and node not in coming]

    def _vacant(self) -> list[int]:
        """The places whose agents are gone, with all their ranks."""
        found = []
        for place, node in enumerate(self._agents.nodes):
            if node.ended and all(self._members[rank].lost for rank in self._ranks(place)):
                found.append(place)
                if node not in self._missed:
                    self._missed.add(node)
                    self._discovery.failed(node.host)
                    if node.told:
                        self._drained.add(node.name)
        return found

    def _ranks(self, place: int) -> list[int]:
        return [slot.rank for slot in self._where.slots if slot.cross_rank == place]

    def _begin(self, place: int) -> None:
        used = {node.name for node in self._agents.nodes if not node.ended} | self._drained
        hosts = [host for host in self._discovery.usable if host.name not in used]
        fitting = [host for host in hosts if not host.slots or host.slots >= len(self._ranks(place))]
        if fitting:
            node = self._agents.replace(place, fitting[0])
            self._attempts.append(Attempt(place, node, time.monotonic() + self._where.config.start_timeout))

    def _lack(self, attempt: Attempt) -> str:
        """Why the host cannot take this place; empty if it can."""
        offer, ranks = room(attempt.node, self._where.config), self._ranks(attempt.place)
        if offer.places < len(ranks) or 0 < len(offer.gpus) < len(ranks):
            return f"it has no room for {len(ranks)} workers"
        if not offer.gpus and any(self._where.slots[rank].gpu is not None for rank in ranks):
            return "it has no GPU, as the one before had"
        if any(
            other.address == network.SAME_MACHINE and other.report["machine"] != offer.machine for other in self._others
        ):
            return "it is another machine than that of all other hosts, which have no address for it"
        return ""

    def _ask_others(self, attempt: Attempt) -> None:
        """Have all hosts that train look for the file in its working folder, and try its addresses, but where all are
        one machine."""
        node, others = attempt.node, self._others
        node.state = f"not all other hosts have told within {PROBE_SECONDS:g} s to reach it"
        attempt.asked, attempt.deadline = True, time.monotonic() + PROBE_SECONDS
        attempt.near = any(other.address == network.SAME_MACHINE for other in others)
        targets: list[Mapping[str, Any]] = []
        if attempt.near:
            attempt.addresses = [{"address": network.SAME_MACHINE, "interface": "", "speed": 0.0}]
        else:
            families = {":" in other.address for other in others}
            allowed = network.allowed(node.report["addresses"], self._where.config.network_interface)
            attempt.addresses = [entry for entry in allowed if (":" in entry["address"]) in families]
            if not {"probe_port", "token"} <= node.report.keys():
                self._fail(attempt, "it does not tell where it can be tried")
                return
            targets.append(target_of(attempt.place, {**node.report, "addresses": attempt.addresses}))
        markers = [{**marker, "index": attempt.place}] if (marker := node.report.get("marker")) else []
        for other in others:
            self._agents.send(other, Frame("probe", {"targets": targets, "markers": markers}))

    def _take(self, attempt: Attempt) -> None:
        """Let a host take its place, once all hosts that train have reported which of its addresses they reach."""
        node, ways = attempt.node, [attempt.reached[other] for other in self._others]
        try:
            node.address, node.interface = network.choose(attempt.addresses, ways)
        except LaunchError as error:
            self._fail(attempt, str(error))
            return
        share_folder(self._agents.nodes, node, attempt.seen)
        self._attempts.remove(attempt)
        self._came.add(node)
        offer, ranks = room(node, self._where.config), self._ranks(attempt.place)
        for rank in ranks:
            self._where.slots[rank] = move(self._where.slots[rank], offer, node.address)
            self._output.move(rank, node.name)
            self._members[rank].host = node.name
            self._members[rank].start_anew()
        self._discovery.served([node.host])
        self._say(f"{node.name} joins: new workers start there in place of {ranks_text(ranks)}", "info")
        self._start(node, ranks, order_to_join(self._where, attempt.place))

    def _fail(self, attempt: Attempt, why: str) -> None:
        self._attempts.remove(attempt)
        self._missed.add(attempt.node)
        self._agents.give_up(attempt.node)
        self._discovery.failed(attempt.node.host)
        self._warn(f"{attempt.node.name}: {why}: training goes on without it")

    def _warn(self, text: str) -> None:
        """Show a warning once, however often it comes."""
        if text not in self._told:
            self._told.add(text)
            self._say(text, "warning")
