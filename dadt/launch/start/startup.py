"""The startup of a job, in which every agent reports about its host and the hosts agree on addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dadt.control import network
from dadt.control.frame import Frame
from dadt.errors import LaunchError, StartTimeout
from dadt.launch.agents import Agents
from dadt.launch.hosts.host import Host
from dadt.launch.members.node import Node
from dadt.launch.start.host_report import problem_of, target_of

STRAGGLER_SECONDS = 15.0
"""How long the other hosts may still take once one has failed, so that all failures are reported together."""
PROBE_SECONDS = 10.0
MARKERS = 64
"""Most hosts whose files the others look for, to find out which hosts see the same folder."""
NAMED_HOSTS = 8
"""With more hosts than this, only those that fail are named as they come."""

LISTED_HOSTS = 64
"""Most hosts whose failures are listed."""


class Voice(Protocol):
    """Output to the user."""

    def say(self, text: str, level: str = "info") -> None: ...

    def part(self, text: str, last: bool = False) -> None:
        """Append to the current line; `last` ends it."""

    def lines(self, stream: str, data: bytes) -> None:
        """Print complete lines of a worker's "out" or "err"."""

    def bars_move(self) -> bool:
        """Whether a live view shows the workers' progress bars as they move."""

    def meanwhile(self, act: Callable[[], None]) -> None:
        """Call `act` about every second while the output is blocked (by a pager or Ctrl-S)."""


def gather(
    agents: Agents,
    look: Callable[[Node], Mapping[str, Any]],
    timeout: float,
    job: str,
    voice: Voice,
    failed: Callable[[Host], None] = lambda host: None,
    *,
    all_needed: bool = True,
) -> None:
    """Wait for all agents. Reports each one that fails, and then raises LaunchError or StartTimeout.

    failed: called with each host that cannot be used.
    all_needed: else hosts that cannot be reached are left out, as long as there are others.
    """
    failures, late = await_agents(agents, look, timeout, job, voice)
    for node in failures:
        failed(node.host)
    away = [node for node in failures if not node.reached]
    if failures and (all_needed or len(away) < len(failures) or len(away) == len(agents.nodes)):
        _refuse(failures, late, timeout, voice)
    for node in away:
        voice.say(f"{node.name}: {failures[node]}: training begins without it", "warning")
    agents.dismiss(away)


def await_agents(
    agents: Agents, look: Callable[[Node], Mapping[str, Any]], timeout: float, job: str, voice: Voice
) -> tuple[dict[Node, str], bool]:
    """Wait until each agent has reported about its host or failed. Returns the reasons by node that cannot take part,
    and whether the timeout passed."""
    named = any(node.name for node in agents.nodes)
    begin = time.monotonic()
    deadline = begin + timeout
    failures: dict[Node, str] = {}
    waiting = set(agents.nodes)
    if named:
        voice.part(f"job {job}: starting {_agents(len(agents.nodes))} ...")
    while waiting and (now := time.monotonic()) < deadline:
        for node, frame in agents.turn(deadline - now):
            if frame.kind == "connected":
                agents.send(node, Frame("look", {**look(node), "index": node.index, "hosts": len(agents.nodes)}))
            elif frame.kind == "lost" or (node in waiting and frame.kind == "ready"):
                waiting.discard(node)
                problem = frame["message"] if frame.kind == "lost" else problem_of(frame, node.name)
                node.report, node.state = frame.header, "is ready"
                if problem:
                    failures[node] = problem
                    deadline = min(deadline, time.monotonic() + STRAGGLER_SECONDS)
                if named and (problem or len(agents.nodes) <= NAMED_HOSTS):
                    voice.part(
                        f"  {node.name} " + ("failed" if problem else f"ready ({time.monotonic() - begin:.1f} s)")
                    )
    if named:
        count = (
            "" if len(agents.nodes) <= NAMED_HOSTS else f"  {len(agents.nodes) - len(failures) - len(waiting)} ready"
        )
        voice.part(count, last=True)
    for node in agents.nodes:
        for text in node.notes:
            voice.say(f"{node.name}: {text}")
    late = time.monotonic() >= begin + timeout
    for node in agents.nodes:
        if node in waiting:
            failures[node] = (
                f"{node.state} after {time.monotonic() - begin:.0f} s" if late else f"{node.state}, given up"
            )
    return failures, late and bool(waiting)


def agree(agents: Agents, wanted: str) -> None:
    """Give each node the address at which all others reach it. Raises LaunchError if there is none."""
    nodes = agents.nodes
    if len(nodes) < 2:
        return
    if len({node.report["machine"] for node in nodes}) == 1 and not wanted:
        for node in nodes:
            node.address = network.SAME_MACHINE
        return
    reports = [{**node.report, "addresses": network.allowed(node.report["addresses"], wanted)} for node in nodes]
    if absent := [node for node, report in zip(nodes, reports, strict=True) if wanted and not report["addresses"]]:
        raise LaunchError(f"--network-interface {wanted}: matches nothing on {'; '.join(map(_offer, absent))}")
    for node in nodes:
        # By place: hosts before it may have been left out.
        targets = [target_of(place, reports[place]) for place, other in enumerate(nodes) if other is not node]
        agents.send(node, Frame("probe", {"targets": targets}))
    reached = {node: frame["reached"] for node, frame in _await_probes(agents).items()}
    chosen = network.agree([node.name for node in nodes], reports, [reached[node] for node in nodes])
    for node, (address, interface) in zip(nodes, chosen, strict=True):
        node.address, node.interface = address, interface


def find_shared_folders(agents: Agents) -> None:
    """Find out which hosts see the same working folder. Each has made a file there when it reported."""
    nodes = agents.nodes
    made = [(place, node.report.get("marker")) for place, node in enumerate(nodes[:MARKERS])]
    markers = [{**marker, "index": place} for place, marker in made if marker]
    if len(nodes) < 2 or not markers:
        return
    for node in nodes:
        agents.send(node, Frame("probe", {"targets": [], "markers": markers}))
    for node, frame in _await_probes(agents).items():
        node.folder = min(frame.get("seen", ()), default=None)


def _await_probes(agents: Agents) -> dict[Node, Frame]:
    deadline = time.monotonic() + PROBE_SECONDS
    reached: dict[Node, Frame] = {}
    while len(reached) < len(agents.nodes):
        if time.monotonic() >= deadline:
            late = ", ".join(node.name for node in agents.nodes if node not in reached)
            raise LaunchError(f"{late}: did not tell within {PROBE_SECONDS:g} s what it reaches of other hosts")
        for node, frame in agents.turn(deadline - time.monotonic()):
            if frame.kind == "probed":
                reached[node] = frame
            elif frame.kind == "lost":
                raise LaunchError(f"{node.name}: {frame['message']}")
    return reached


def _offer(node: Node) -> str:
    found = ", ".join(f"{entry['interface']} {entry['address']}" for entry in node.report["addresses"])
    return f"{node.name}, which has {found or 'no address for other hosts'}"


def _refuse(failures: Mapping[Node, str], late: bool, timeout: float, voice: Voice) -> None:
    kind: Callable[[str], LaunchError | StartTimeout] = StartTimeout if late else LaunchError
    texts = [f"{node.name}: {text}" if node.name else text for node, text in failures.items()]
    if len(texts) == 1 and not next(iter(failures)).name:
        raise kind(texts[0])
    for text in texts[:LISTED_HOSTS]:
        voice.say(text, "error")
    if len(texts) > LISTED_HOSTS:
        voice.say(f"... and {len(texts) - LISTED_HOSTS:,} other hosts", "error")
    after = f" within --start-timeout {timeout:g} s" if late else ""
    raise kind(f"nothing was started{after}; exit code {kind('').exit_code}")


def _agents(count: int) -> str:
    return "1 agent" if count == 1 else f"{count} agents"
