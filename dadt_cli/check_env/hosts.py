"""Checks several hosts: each host by an agent that runs there, and the connections between hosts.

Agents start and their addresses are found as in `dadt run`. A host that `dadt run` would refuse is reported with the
reason; all other hosts are checked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dadt.config import Config
from dadt.control.frame import Frame
from dadt.control.job_folder import Folder
from dadt.control.uptime import uptime
from dadt.errors import LaunchError
from dadt.launch.actions import Action, Outbox, StartAction
from dadt.launch.agents import Agents
from dadt.launch.attempt import HANG_UP_SECONDS
from dadt.launch.channel import AgentRequest
from dadt.launch.ending.failure import last_line
from dadt.launch.ending.processes import sweep
from dadt.launch.hosts.host import Host
from dadt.launch.launchers import launcher_of
from dadt.launch.members.node import Node
from dadt.launch.start import orders, plan, startup
from dadt.launch.start.plan import Plan
from dadt.launch.start.startup import Voice
from dadt_cli.check_env import SUBJECTS, matrix, training
from dadt_cli.check_env.check import WARN, Check, CheckOptions, fail, good, refused, warn
from dadt_cli.check_env.pairs import TOKEN_BYTES, HostPair, PairOrder
from dadt_cli.check_env.probe import longest

REACHED_BY = (
    *("ssh_backend", "ssh_port", "ssh_identity_file", "ssh_config", "ssh_host_keys"),
    *("network_interface", "python", "prologue"),
)
"""Settings that decide how hosts are reached, and which Python runs there."""
SPARE_SECONDS = 15.0
SKEW_SECONDS = 1.0
"""Difference in seconds between two hosts' clocks above which times in logs are misleading."""
NOTHING_ELSE = {"terminal": None, "adopt": 0.0, "secret": ""}
"""Entries of an agent's order that only workers of a script need, with neutral values."""
OUT_LIMIT = 4 << 20
ABSENT = "none"
SAME = "install the same on all hosts, or let --python name the same environment"
REMEDIES = {
    "network MTU": "ip link set DEVICE mtu N: the same on all hosts, and no more than the switches between them take"
}
"""Remedies for differences between hosts that cannot be removed by installing software, by the name of the check."""
SSH = "docs/ssh.md says what the other host needs"


@dataclass(slots=True)
class HostChecks:
    """The results of all checks: of each host, and between hosts."""

    hosts: dict[str, list[Check]] = field(default_factory=dict)
    between: list[Check] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    """An entry of the JSON output for each pair of hosts: names, round trip, jitter and speed."""

    @property
    def all(self) -> list[Check]:
        return [*self.between, *(check for checks in self.hosts.values() for check in checks)]


def look(config: Config, asked: CheckOptions, voice: Voice) -> HostChecks:
    """Check all hosts of the configuration, and the connections between them. Raises DadtError if nothing can be
    checked."""
    the_plan = plan.make(config, [sys.executable])
    folder = Folder.reserve(Path(config.log_dir))
    ready: dict[str, float] = {}
    begin = time.monotonic()

    def see(host: str, frame: Frame) -> None:
        if frame.kind == "ready":
            ready[host] = time.monotonic() - begin

    try:
        launcher = launcher_of(AgentRequest(the_plan.config, the_plan.hosts, the_plan.command, folder.job))
        agents = Agents(launcher, the_plan.hosts, config.orphan_timeout, see)
        voice.meanwhile(agents.beat)
        try:
            found = _look(the_plan, replace(asked, hosts=len(the_plan.hosts)), agents, folder.job, voice, ready)
        finally:
            voice.meanwhile(lambda: None)
            agents.close(HANG_UP_SECONDS)
            sweep(f"DADT_JOB={folder.job}")
    finally:
        folder.remove()
    if asked.full:
        found.between += _between(config, [host for host in the_plan.hosts if is_checked(found.hosts[host.name])])
    return found


def _look(
    the_plan: Plan, asked: CheckOptions, agents: Agents, job: str, voice: Voice, ready: Mapping[str, float]
) -> HostChecks:
    config = the_plan.config
    nodes = list(agents.nodes)
    outbox = Outbox()
    steps = startup.await_agents(agents.nodes, config.start_timeout, job, outbox, time.monotonic())

    def perform(action: Action) -> None:
        assert isinstance(action, StartAction)
        agents.start_up(action, voice, partial(_order, the_plan, job))

    failures, _, _ = agents.go_through(steps, outbox, perform)
    found = HostChecks({node.name: [] for node in nodes})
    for node, reason in failures.items():
        subject, hint = ("ssh", SSH) if node.name else ("python", "")
        found.hosts[node.name] = [refused("agent", reason, hint).of(subject)]
    startup.dismiss(agents.nodes, list(failures), outbox)
    outbox.empty(perform)
    for node in agents.nodes:
        found.hosts[node.name] = [_agent(node, ready[node.name]), *_shell(agents.preface(node)), _clock(node)]
    found.between += [*_names(agents.nodes), *_addresses(agents, config.network_interface, outbox, perform)]
    if agents.nodes:
        how_long = "some minutes" if asked.full else "up to a minute"
        voice.say(f"checking {', '.join(node.name for node in agents.nodes)}: this takes {how_long}")
    for node in agents.nodes:
        if node.address:
            found.hosts[node.name].append(
                good("address", f"{node.address} ({node.interface or 'this machine'})").of("hosts")
            )
    results, ways = _results(agents, asked, job)
    for node, checks in results.items():
        found.hosts[node.name] += checks
    names = [node.name for node in agents.nodes]
    found.between += [check.of("hosts") for check in matrix.judged(ways, names, [_link(node) for node in agents.nodes])]
    found.pairs = matrix.as_pairs(ways, names)
    found.between += differences(found.hosts)
    return found


def _order(the_plan: Plan, job: str, node: Node) -> Mapping[str, Any]:
    """Build the order for the checks that an agent makes before it reports ready. Files and the workers' folder are
    left out; later checks cover them."""
    return {**orders.look(the_plan, job, node), "cwd": "/", "files": []}


def _agent(node: Node, seconds: float) -> Check:
    return good("agent", f"ready after {seconds:.1f} s, {node.report['executable']}").of("ssh")


def _shell(printed: bytes) -> Iterator[Check]:
    """Warn if a host's login shell prints something, since scp, rsync and MPI fail because of the output, although dadt
    does not."""
    if words := last_line(printed):
        hint = "let its .bashrc print only where a person reads it: [[ $- == *i* ]] || return"
        yield warn("shell", f"prints before it runs a command: {words[:80]!r}", hint).of("ssh")


def _clock(node: Node) -> Check:
    began, began_here = node.report["date"] - (node.report["clock"] - node.clock), time.time() - uptime()
    if abs(skew := began - began_here) > SKEW_SECONDS:
        value = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        return warn("clock", value, "let chrony or ntpd set it: times in logs and timelines mislead").of("hosts")
    return good("clock", "agrees with this machine's").of("hosts")


def _names(nodes: Sequence[Node]) -> Iterator[Check]:
    """Fail if several machines have the same host name: MPI and other tools would take them for one machine."""
    owners: dict[str, dict[str, str]] = {}
    for node in nodes:
        owners.setdefault(node.report["hostname"], {}).setdefault(node.report["machine"], node.name)
    for hostname, machines in owners.items():
        if len(machines) > 1:
            value = f"{' and '.join(machines.values())} all call themselves {hostname}"
            hint = "hostnamectl set-hostname NAME, another one on each: MPI takes them for one machine"
            yield fail("host names", value, hint).of("hosts")


def _addresses(agents: Agents, wanted: str, outbox: Outbox, perform: Callable[[Action], None]) -> list[Check]:
    """Let the agents find an address of each host by which all other hosts reach it; return checks of the result."""
    if len(agents.nodes) < 2:
        return []
    machines: dict[str, list[str]] = {}
    for node in agents.nodes:
        machines.setdefault(node.report["machine"], []).append(node.name)
    found = []
    for names in machines.values():
        if len(names) > 1:
            hint = "name it once, with all of its slots"
            found.append(warn("machines", f"{' and '.join(names)} are one machine", hint).of("hosts"))
    try:
        agents.go_through(startup.agree(agents.nodes, wanted, outbox, time.monotonic()), outbox, perform)
    except LaunchError as error:
        return [*found, refused("connections", str(error), "open the firewall between them").of("hosts")]
    return [*found, good("connections", f"each of {len(agents.nodes)} hosts reaches all others").of("hosts")]


def _link(node: Node) -> float:
    """Return the bits per second of the network card that a host uses; 0 if the card does not report its speed."""
    speeds = [entry["speed"] for entry in node.report["addresses"] if entry["address"] == node.address]
    return 1e6 * max(speeds, default=0)


def _orders(nodes: Sequence[Node], asked: CheckOptions) -> list[PairOrder]:
    """Build an order for each host to measure its connections to the others; none if a host has no address that others
    reach."""
    if len(nodes) < 2 or not all(node.address for node in nodes):
        return []
    addresses = [(node.address, node.report["ports"][0]) for node in nodes]
    token = os.urandom(TOKEN_BYTES).hex()
    return [PairOrder(index=index, addresses=addresses, token=token, speed=asked.full) for index in range(len(nodes))]


def _results(agents: Agents, asked: CheckOptions, job: str) -> tuple[dict[Node, list[Check]], list[HostPair]]:
    """Run the checks on all hosts at once. Returns the checks of each host, and measurements between hosts, which name
    hosts by their indices in `agents.nodes`."""
    orders = _orders(agents.nodes, asked)
    peers = dict.fromkeys(name for node in agents.nodes for name in (node.name, node.address) if name and orders)
    asked = replace(asked, peers=tuple(peers))
    seconds = longest(asked) + SPARE_SECONDS + max((order.seconds for order in orders), default=0.0)
    outs: dict[Node, bytes] = dict.fromkeys(agents.nodes, b"")
    errors: dict[Node, str] = {}
    waiting = set(agents.nodes)
    for rank, node in enumerate(agents.nodes):
        command = [node.report["executable"], "-m", "dadt_cli.check_env", json.dumps(asdict(asked))]
        command += [json.dumps(asdict(order)) for order in orders[rank : rank + 1]]
        worker = {"rank": rank, "local_rank": 0, "command": command, "env": {"DADT_JOB": job, "DADT_THREADS": ""}}
        node.ranks = frozenset([rank])
        agents.send(node, Frame("job", {"job": job, "env": {}, "workers": [worker], "cwd": "/", **NOTHING_ELSE}))
    deadline = time.monotonic() + seconds
    while waiting and (now := time.monotonic()) < deadline:
        for node, frame in agents.turn(deadline - now):
            if frame.kind == "out" and len(outs[node]) < OUT_LIMIT:
                outs[node] += frame.body
            elif frame.kind == "err":
                errors[node] = last_line(frame.body) or errors.get(node, "")
            elif frame.kind in ("lost", "unstarted"):
                errors[node] = frame["message"]
            if frame.kind in ("lost", "end"):
                waiting.discard(node)
    late = f"no answer within {seconds:.0f} s"
    checks: dict[Node, list[Check]] = {}
    ways: list[HostPair] = []
    for node in agents.nodes:
        checks[node], seen = _parsed(outs[node], late if node in waiting else errors.get(node, "no result"))
        ways += seen
    return checks, ways


def _parsed(out: bytes, error: str) -> tuple[list[Check], list[HostPair]]:
    try:
        told = json.loads(out)
        return [Check(**fields) for fields in told["checks"]], [HostPair(**fields) for fields in told["ways"]]
    except (ValueError, TypeError, KeyError):  # no output, or the output of another version of DADT
        return [fail("checks", error, "run dadt check-env on that host").of("hosts")], []


def differences(hosts: Mapping[str, Sequence[Check]]) -> list[Check]:
    """Return a check for each value that should be equal on all checked hosts and is not."""
    told = {
        host: {f"{check.subject} {check.name}": check for check in checks if check.alike}
        for host, checks in hosts.items()
        if is_checked(checks)
    }
    found = []
    for name in dict.fromkeys(name for checks in told.values() for name in checks):
        owners: dict[str, list[str]] = {}
        for host, checks in told.items():
            owners.setdefault(checks[name].value if name in checks else ABSENT, []).append(host)
        if len(owners) > 1:
            listed = "; ".join(f"{value} on {', '.join(names)}" for value, names in owners.items())
            alike = next(checks[name].alike for checks in told.values() if name in checks)
            verdict = WARN if ABSENT in owners else alike
            found.append(Check(name=name, verdict=verdict, value=listed, hint=REMEDIES.get(name, SAME)).of("hosts"))
    return found


def is_checked(checks: Sequence[Check]) -> bool:
    """Return whether the host itself was checked, not only the connection to it."""
    return any(check.subject in SUBJECTS for check in checks)


def _typed(host: Host) -> str:
    """Return the host in the syntax of -H, with one slot."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name}:1" if host.user else f"{name}:1"


def _between(config: Config, hosts: Sequence[Host]) -> list[Check]:
    """Run a real job over all hosts that answered, to check whether it trains and how fast tensors are averaged."""
    if len(hosts) < 2:
        return []
    names = ",".join(_typed(host) for host in hosts)
    settings: dict[str, Any] = {name: getattr(config, name) for name in REACHED_BY}
    settings |= {"executor": "gloo", "workdir": "/"}
    asked = CheckOptions(full=True, hosts=len(hosts))
    return [
        training.train("training", asked, len(hosts), names, **settings).of("hosts"),
        training.exchange("speed", len(hosts), names, **settings).of("hosts"),
    ]
