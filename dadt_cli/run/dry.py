"""`dadt run --dry-run`: prints the plan, each worker's environment and the command for each host."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path

from dadt.control import machine
from dadt.errors import ConfigError
from dadt.launch.channel import AgentRequest
from dadt.launch.hosts.slot import place, share_out
from dadt.launch.launchers import launcher_of
from dadt.launch.members.node import Node
from dadt.launch.start.host_report import room
from dadt.launch.start.orders import orders
from dadt.launch.start.placement import Placed
from dadt.launch.start.plan import Plan
from dadt.launch.start.torch_world import island_size, worlds
from dadt_cli.terminal.table import table

JOB = "JOB"
PORT = 0
HOSTS = 16
"""Most hosts for which the command and each worker's variables are printed."""
NAMES = {"DADT_THREADS": "OMP_NUM_THREADS"}
"""Variables that the agent passes to workers under another name, unless the user has set the other name."""


def describe(the_plan: Plan) -> list[str]:
    """Describe the plan without contacting any host, so the GPUs and addresses of other hosts are unknown."""
    config = the_plan.config
    if not the_plan.hosts:
        raise ConfigError(f"--host-discovery-script {config.host_discovery_script}: there is no host now")
    launcher = launcher_of(AgentRequest(config, the_plan.hosts, the_plan.command, JOB))
    here = {"machine": machine.identity(), "gpus": machine.gpus(), "cores": machine.cores(), "ports": [PORT]}
    there = {**here, "machine": "", "gpus": []}
    hosts = enumerate(the_plan.hosts)
    nodes = [Node(index, host, report=here if host.is_here else there) for index, host in hosts]
    rooms = [room(node, config) for node in nodes]
    fit = sum(each.places for each in rooms)
    shares = share_out(min(config.np, max(fit, config.min_np)) if config.min_np else config.np, rooms)
    used = [index for index, share in enumerate(shares) if share]
    nodes = [nodes[index] for index in used]
    for node in nodes:
        node.address = f"<address of {node.name}>" if len(nodes) > 1 else ""
    slots = place([shares[i] for i in used], [rooms[i] for i in used], [node.address for node in nodes])
    size = island_size(config.island, slots)
    where = Placed(
        plan=the_plan,
        config=config,
        job=JOB,
        logs=Path(config.log_dir) / JOB,
        nodes=nodes,
        slots=slots,
        torch=worlds(slots, nodes, size),
        secret="",
    )
    lines = [f"{size_of(where)}, algorithm {config.algorithm}, logs in {where.logs}"]
    unsure = [node.name for node in nodes if not (node.host.slots or node.host.is_here)]
    if unsure:
        lines.append(f"slots of {', '.join(unsure)} are unknown until their agents count GPUs; one each is assumed")
    lines += ["", *placement(where)]
    for node, order in zip(nodes[:HOSTS], orders(where), strict=False):
        lines += ["", f"{node.name or 'this host'}: {launcher.command(node.host)}", f"  in {the_plan.cwd}"]
        given = the_plan.named if node.host.is_here else the_plan.elsewhere
        lines += _variables("  for each worker, beside the host's own:", {**given, **order["env"]})
        for worker in order["workers"]:
            lines.append(f"  rank {worker['rank']}: {shlex.join(worker['command'])}")
            lines += _variables("", worker["env"])
    if nodes[HOSTS:]:
        lines += ["", f"and {len(nodes) - HOSTS} more hosts in the same way"]
    launcher.close()
    return lines


def size_of(where: Placed) -> str:
    """Return the numbers of workers and hosts as text, such as "4 workers on 2 hosts"."""
    workers = "1 worker" if len(where.slots) == 1 else f"{len(where.slots)} workers"
    names = [node.name for node in where.nodes]
    return f"{workers} on " + (names[0] or "this host" if len(names) == 1 else f"{len(names)} hosts")


def placement(where: Placed) -> list[str]:
    """Return a table that shows on which host and GPU each rank runs."""
    head = ("rank", "host", "local rank", "address", "GPU", "threads")
    rows = [
        (slot.rank, slot.host or "this host", slot.local_rank, slot.address or "-", slot.gpu or "-", slot.threads)
        for slot in where.slots
    ]
    return table(head, [tuple(map(str, row)) for row in rows], left=head)


def _variables(head: str, variables: Mapping[str, str]) -> list[str]:
    known = {NAMES.get(name, name): value for name, value in variables.items() if value}
    if known.get("MASTER_PORT") == str(PORT):
        known["MASTER_PORT"] = "<a free port>"
    shown = [_assignment(name, value) for name, value in sorted(known.items())]
    return [head, *shown] if head else shown


@functools.lru_cache
def _assignment(name: str, value: str) -> str:
    return f"    {name}={shlex.quote(value)}"
