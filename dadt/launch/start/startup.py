"""The startup of a job, in which every agent reports about its host and the hosts agree on addresses.

The functions do no I/O themselves. They are generators that yield a deadline, and are then sent either an event or,
once the deadline has passed, only the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dadt.control import network
from dadt.control.absence import Deadline
from dadt.control.frame import Frame
from dadt.errors import LaunchError, StartTimeout
from dadt.launch.actions import AskHost, DismissHosts, Outbox, SayPart, Steps, TimeReached
from dadt.launch.ending.outcome import not_started
from dadt.launch.hosts.candidates import Candidates
from dadt.launch.members.node import Node
from dadt.launch.start.host_report import problem_of, target_of

STRAGGLER_SECONDS = 15.0
"""Seconds to wait for the other hosts after one has failed, so that all failures can be reported together."""
PROBE_SECONDS = 10.0
MARKERS = 64
"""Largest number of hosts whose marker files are looked for. Each host has such a file in its working folder, by which
the other hosts find out whether they share the folder."""
NAMED_HOSTS = 8
"""In a job of more hosts than this, the text that shows the progress of the startup names only hosts that failed."""

LISTED_HOSTS = 64
"""Largest number of hosts whose failures are shown to the user."""


class Voice(Protocol):
    """Interface for output to the user."""

    def say(self, text: str, level: str = "info") -> None: ...

    def part(self, text: str, last: bool = False) -> None:
        """Append a text to the current line of output. last: whether this ends the line."""

    def lines(self, stream: str, data: bytes) -> None:
        """Print complete lines that a worker wrote. stream: "out" or "err"."""

    def bars_move(self) -> bool:
        """Return whether a live view shows the progress bars of workers while they move."""

    def meanwhile(self, act: Callable[[], None]) -> None:
        """Set a function that is called about every second while output to the user is blocked, for example by a pager
        or Ctrl-S."""


def gather(
    nodes: list[Node],
    timeout: float,
    job: str,
    candidates: Candidates,
    outbox: Outbox,
    now: float,
    *,
    all_needed: bool = True,
    again: bool = False,
) -> Steps[float]:
    """Wait for the reports of all agents. If hosts failed, shows each of them to the user and raises LaunchError or
    StartTimeout. Returns the time at the end of the wait.

    all_needed: if false, hosts that cannot be reached are left out, as long as other hosts are left. again: whether the
    job had workers before, and is being restarted.
    """
    failures, late, now = yield from await_agents(nodes, timeout, job, outbox, now)
    for node in failures:
        candidates.failed(node.host, now)
    away = [node for node in failures if not node.reached]
    if failures and (all_needed or len(away) < len(failures) or len(away) == len(nodes)):
        _refuse(failures, timeout if late else 0.0, again, outbox)
    for node in away:
        outbox.say(f"{node.name}: {failures[node]}: training begins without it", "warning")
    dismiss(nodes, away, outbox)
    return now


def dismiss(nodes: list[Node], idle: Sequence[Node], outbox: Outbox) -> None:
    """End the agents of the hosts `idle`, which get no workers, and remove these hosts from the list `nodes`."""
    for node in idle:
        nodes.remove(node)
    outbox.put(DismissHosts(idle))


def await_agents(
    nodes: Sequence[Node], timeout: float, job: str, outbox: Outbox, now: float
) -> Steps[tuple[dict[Node, str], bool, float]]:
    """Wait until each agent has reported about its host or failed. Returns why nodes cannot take part (a text for each
    such node), whether the timeout passed, and the time at the end of the wait."""
    named = any(node.name for node in nodes)
    many = len(nodes) > NAMED_HOSTS
    begin, deadline = now, Deadline(timeout, now)
    failures: dict[Node, str] = {}
    waiting = set(nodes)
    if named:
        outbox.put(SayPart(f"job {job}: starting {len(nodes)} agent{'s' * (len(nodes) > 1)} ..."))
    while waiting:
        event = yield deadline.look_at
        now = event.now
        begin += deadline.turn(now)
        if isinstance(event, TimeReached):  # all events until this time were handled before
            if now >= deadline.at:
                break
            continue
        node, frame = event.node, event.frame
        if frame.kind == "connected":
            outbox.put(AskHost(node, node.index))
        elif frame.kind == "lost" or (node in waiting and frame.kind == "ready"):
            waiting.discard(node)
            problem = frame["message"] if frame.kind == "lost" else problem_of(frame, node.name)
            node.report, node.state = frame.header, "is ready"
            if problem:
                failures[node] = problem
                deadline.hasten(now + STRAGGLER_SECONDS)
            if named and (problem or not many):
                outcome = "failed" if problem else f"ready ({now - begin:.1f} s)"
                outbox.put(SayPart(f"  {node.name} {outcome}"))
    if named:
        ready = len(nodes) - len(failures) - len(waiting)
        outbox.put(SayPart(f"  {ready} ready" if many else "", last=True))
    for node in nodes:
        for text in node.notes:
            outbox.say(f"{node.name}: {text}")
    late = now >= begin + timeout
    for node in nodes:
        if node in waiting:
            failures[node] = f"{node.state} after {now - begin:.0f} s" if late else f"{node.state}, given up"
    return failures, late and bool(waiting), now


def agree(nodes: Sequence[Node], wanted: str, outbox: Outbox, now: float) -> Steps[float]:
    """Choose, for each node, an address at which all other nodes reach it. Raises LaunchError if there is none. Returns
    the time at the end of the wait."""
    if len(nodes) < 2:
        return now
    if len({node.report["machine"] for node in nodes}) == 1 and not wanted:
        for node in nodes:
            node.address = network.SAME_MACHINE
        return now
    reports = [{**node.report, "addresses": network.allowed(node.report["addresses"], wanted)} for node in nodes]
    if absent := [node for node, report in zip(nodes, reports, strict=True) if wanted and not report["addresses"]]:
        raise LaunchError(f"--network-interface {wanted}: matches nothing on {'; '.join(map(_offer, absent))}")
    for node in nodes:
        # Targets are numbered by their position in `nodes`. This differs from node.index if hosts that come before were
        # left out.
        targets = [target_of(place, reports[place]) for place, other in enumerate(nodes) if other is not node]
        outbox.send(node, Frame("probe", {"targets": targets}))
    answers, now = yield from _await_probes(nodes, now)
    reached = {node: frame["reached"] for node, frame in answers.items()}
    chosen = network.agree([node.name for node in nodes], reports, [reached[node] for node in nodes])
    for node, (address, interface) in zip(nodes, chosen, strict=True):
        node.address, node.interface = address, interface
    return now


def find_shared_folders(nodes: Sequence[Node], outbox: Outbox, now: float) -> Steps[None]:
    """Find out which hosts share a working folder. Each host has created a marker file in its folder, for which the
    others look."""
    made = [(place, node.report.get("marker")) for place, node in enumerate(nodes[:MARKERS])]
    markers = [{**marker, "index": place} for place, marker in made if marker]
    if len(nodes) < 2 or not markers:
        return
    for node in nodes:
        outbox.send(node, Frame("probe", {"targets": [], "markers": markers}))
    answers, _ = yield from _await_probes(nodes, now)
    for node, frame in answers.items():
        node.folder = min(frame.get("seen", ()), default=None)


def _await_probes(nodes: Sequence[Node], now: float) -> Steps[tuple[dict[Node, Frame], float]]:
    deadline = Deadline(PROBE_SECONDS, now)
    reached: dict[Node, Frame] = {}
    while len(reached) < len(nodes):
        event = yield deadline.look_at
        now = event.now
        deadline.turn(now)
        if isinstance(event, TimeReached):  # all events until this time were handled before
            if now >= deadline.at:
                late = ", ".join(node.name for node in nodes if node not in reached)
                raise LaunchError(f"{late}: did not tell within {PROBE_SECONDS:g} s what it reaches of other hosts")
            continue
        if event.frame.kind == "probed":
            reached[event.node] = event.frame
        elif event.frame.kind == "lost":
            raise LaunchError(f"{event.node.name}: {event.frame['message']}")
    return reached, now


def _offer(node: Node) -> str:
    found = ", ".join(f"{entry['interface']} {entry['address']}" for entry in node.report["addresses"])
    return f"{node.name}, which has {found or 'no address for other hosts'}"


def _refuse(failures: Mapping[Node, str], timeout: float, again: bool, outbox: Outbox) -> None:
    """Raise the error for a job in which these hosts failed, after showing the reasons. timeout: the time limit in
    seconds, if the hosts failed because they were too slow; otherwise 0."""
    kind: Callable[[str], LaunchError | StartTimeout] = StartTimeout if timeout else LaunchError
    texts = [f"{node.name}: {text}" if node.name else text for node, text in failures.items()]
    if len(texts) == 1 and not next(iter(failures)).name:
        raise kind(texts[0])
    for text in texts[:LISTED_HOSTS]:
        outbox.say(text, "error")
    if len(texts) > LISTED_HOSTS:
        outbox.say(f"... and {len(texts) - LISTED_HOSTS:,} other hosts", "error")
    after = f" within --start-timeout {timeout:g} s" if timeout else ""
    raise kind(f"{not_started(again)}{after}; exit code {kind('').exit_code}")
