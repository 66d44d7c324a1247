"""Assigns a host and a GPU to every worker of a job, once all hosts have reported."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dadt.config import Config
from dadt.config.executor import HostWorkers, choose
from dadt.errors import LaunchError
from dadt.launch.actions import Outbox, Steps
from dadt.launch.hosts.slot import Slot, place, share_out
from dadt.launch.members.node import Node
from dadt.launch.start.host_report import differences, room
from dadt.launch.start.plan import Plan
from dadt.launch.start.startup import agree, dismiss, find_shared_folders
from dadt.launch.start.torch_world import TorchWorld, fewest, island_size, may_divide, worlds


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A planned job after its workers were placed on hosts."""

    plan: Plan
    config: Config
    """The configuration, with all choices made that must be the same on all ranks."""
    job: str
    logs: Path
    nodes: list[Node]
    slots: list[Slot]
    """Place of each worker, by rank. When a host joins the running job in place of a lost one, the places of its ranks
    are replaced."""
    torch: Sequence[TorchWorld]
    """Each rank's position as torch sees it, by rank."""
    secret: str
    """Random hexadecimal secret that the launcher, the agents and the workers of this job share."""
    why: str = ""
    """Text for the user that names the chosen executor and says why it was chosen."""
    restarts: int = 0
    """Number of restarts of the job before this attempt."""


def place_workers(the_plan: Plan, nodes: list[Node], job: str, outbox: Outbox, now: float) -> Steps[Placed]:
    """Assign each worker its place, once all hosts have reported. The agents of hosts that get no workers are ended.
    Raises LaunchError if the hosts have room for fewer workers than --min-np."""
    config = the_plan.config
    rooms = [room(node, config) for node in nodes]
    missing = len(the_plan.hosts) - len(nodes)
    fit = sum(each.places for each in rooms)
    if config.min_np and fit < (least := fewest(config)):
        absent = f", without the {missing} that cannot be reached" if missing else ""
        asked = f"--min-np {least}" if least == config.min_np else f"-np {least} in islands"
        raise LaunchError(f"{asked}: the hosts have room for {fit} workers{absent}")
    if fit < config.np and config.min_np and not missing:
        outbox.say(f"the hosts have room for {fit} of {config.np} workers: training begins with these", "warning")
    shares = share_out(min(config.np, fit) if config.min_np else config.np, rooms)
    idle = [node for node, share in zip(nodes, shares, strict=True) if not share]
    if idle:
        outbox.say(f"{', '.join(node.name for node in idle)} not used: {sum(shares)} workers fit on the other hosts")
        dismiss(nodes, idle, outbox)
    for text in differences(nodes):
        outbox.say(text, "warning")
    now = yield from agree(nodes, config.network_interface, outbox, now)
    yield from find_shared_folders(nodes, outbox, now)
    rooms = [room for room, share in zip(rooms, shares, strict=True) if share]
    shares = [share for share in shares if share]
    slots = place(shares, rooms, [node.address for node in nodes])
    size = island_size(config.island, slots)
    divides = may_divide(config.island, slots)
    divisors = ",".join(str(the_plan.divisors.get(slot.rank, 1)) for slot in slots) if the_plan.divisors else ""
    slots = [replace(slot, island_size=size, may_divide=divides, divisors=divisors) for slot in slots]
    config, why = _resolved(config, slots, nodes)
    return Placed(
        plan=the_plan,
        config=config,
        why=why,
        job=job,
        logs=Path(config.log_dir) / job,
        nodes=nodes,
        slots=slots,
        torch=worlds(slots, nodes, size),
        secret=secrets.token_hex(32),
    )


def _resolved(config: Config, slots: Sequence[Slot], nodes: Sequence[Node]) -> tuple[Config, str]:
    """Return the configuration with all choices made that must be the same on all ranks (the executors and, if none was
    set, a random seed), and the reason why these executors were chosen."""
    if config.seed < 0:
        config = replace(config, seed=secrets.randbelow(2**31))
    # Only ranks that exchange with each other are counted: all ranks, or with islands those with the same position in
    # their islands.
    workers = Counter(slot.cross_rank for slot in slots if slot.rank % (slot.island_size or 1) == 0)
    return choose(config, [_place(workers[index], node) for index, node in enumerate(nodes) if workers[index]])


def _place(workers: int, node: Node) -> HostWorkers:
    usable = not str(node.report.get("torch", "")).endswith("+cpu")
    # with Ray, several workers may share a GPU, which counts once
    return HostWorkers(node.name, workers, len({*node.report["gpus"]}) if usable else 0)
