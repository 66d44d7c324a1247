"""Builds the two orders that the launcher sends to each agent at the start of a job: the first to report about its
host, the second to start its workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dadt.config import Config
from dadt.config.check import LEAST_TIMEOUT
from dadt.config.executor import mpi_executor
from dadt.control import shared_folder
from dadt.control.frame import Frame
from dadt.control.network import SAME_MACHINE
from dadt.launch.ending.signals import of_checkpoint
from dadt.launch.hosts.slot import Slot
from dadt.launch.members.node import Node
from dadt.launch.members.replacement import replaces
from dadt.launch.members.stalls import patience
from dadt.launch.start import environment, plan, standard_input
from dadt.launch.start.placement import Placed
from dadt.launch.start.plan import Plan
from dadt.launch.start.torch_world import TorchWorld, worlds


def look(the_plan: Plan, job: str, node: Node) -> Mapping[str, Any]:
    """Return the fields of the `look` frame, which asks an agent to report about its host."""
    config = the_plan.config
    # With --nnodes, the user starts `dadt run` on each host, so each agent already has the environment that is right
    # for its host.
    has_own = node.is_child or config.nnodes
    return {
        "job": job,
        "cwd": the_plan.cwd,
        "files": list(the_plan.files),
        "prologue": config.prologue,
        "mpi": mpi_executor(config),
        # a child process needs no timeout, since the launcher's end closes its pipe
        "orphan_timeout": None if node.is_child else config.orphan_timeout,
        "env": dict(the_plan.named if has_own else the_plan.elsewhere),
    }


def orders(where: Placed) -> Iterator[Frame]:
    """Yield, for each node in order, the frame that orders its agent to start its workers."""
    slots: list[list[Slot]] = [[] for _ in where.nodes]
    for slot in where.slots:
        slots[slot.cross_rank].append(slot)
    env, beats = _common(where), heartbeats(where)
    seen = {slot.rank: (slot.cross_rank, where.nodes[slot.cross_rank].folder) for slot in where.slots}
    writers = shared_folder.writers(seen)
    for mine, node in zip(slots, where.nodes, strict=True):
        yield _order(where, mine, node, env, writers, beats=beats)


def order_to_join(where: Placed, place: int, saves: int) -> Frame:
    """Return the order to start workers for the agent of a host that has taken the place of a lost one in the running
    job. It does not say which rank writes files in a shared folder, as its workers learn this when they join. saves:
    number of checkpoint signals that the job's workers were sent before."""
    slots = [slot for slot in where.slots if slot.cross_rank == place]
    if size := slots[0].island_size:  # the island's ranks meet at an address of the new host
        where = replace(where, torch=worlds(where.slots, where.nodes, size))
    return _order(
        where, slots, where.nodes[place], _common(where), {}, beats=heartbeats(where), joins=True, saves=saves
    )


def _common(where: Placed) -> dict[str, str]:
    """Return the environment variables that are the same for all workers of the job."""
    given = environment.torchrun(where.config, where.job, where.restarts)
    return {**environment.common(where.config), **given}


def _order(
    where: Placed,
    slots: Sequence[Slot],
    node: Node,
    env: Mapping[str, str],
    writers: Mapping[int, int],
    *,
    beats: bool,
    joins: bool = False,
    saves: int = 0,
) -> Frame:
    """Return the frame that orders one agent to start its workers. env: variables that all workers of the job get.
    writers: for each rank in a shared working folder, the rank that writes files there. beats: whether the hosts send
    each other heartbeats. joins: whether the workers join a running job. saves: see `order_to_join`."""
    told = where.config.pass_local_rank or any("rank}" in part for part in where.plan.command)
    workers = [
        {
            "rank": slot.rank,
            "local_rank": slot.local_rank,
            "env": environment.own(
                slot, where.job, _torch(where, slot), told=told, restarts=where.restarts, joins=joins
            )
            | {"DADT_FOLDER_WRITER": str(writers.get(slot.rank, -1))},
            "command": command_of(where, slot),
        }
        for slot in slots
    ]
    # Seconds that mpirun may take to start the workers; 0 if the agent starts them itself.
    adopt = where.config.start_timeout if where.config.launcher == "mpi" else 0.0
    header: dict[str, Any] = {
        "job": where.job,
        "env": {**env, "DADT_INTERFACE": node.interface},
        "workers": workers,
        "cwd": where.plan.cwd,
        "terminal": standard_input.terminal_size(),
        "adopt": adopt,
        "stays": replaces(where.config),
        "secret": where.secret,
    }
    if number := of_checkpoint(where.config):
        # `alone` says whether the ranks of other hosts can continue training without this host.
        island = slots[0].island_size or 1
        alone = 0 < where.config.min_np * island <= len(where.slots) - len(slots)
        facts = {"number": number, "grace": where.config.grace, "alone": alone, "island": island, "saves": saves}
        header["checkpoint"] = facts
    if beats:
        own = {"index": slots[0].cross_rank, "address": node.address, "timeout": _heartbeat_timeout(where.config)}
        header |= {"heartbeat": own}
    return Frame("job", header, where.plan.blob)


def heartbeats(where: Placed) -> bool:
    """Return whether the hosts send each other heartbeats. Hosts that are all the same machine do not."""
    apart = len(where.nodes) > 1 and all(node.address != SAME_MACHINE for node in where.nodes)
    return apart and where.config.heartbeat_timeout > 0


def _heartbeat_timeout(config: Config) -> float:
    """Return the seconds after which a host counts as silent: so few that this is known by the time that ranks give up
    waiting for what does not come through."""
    return min(config.heartbeat_timeout, max(LEAST_TIMEOUT, patience(config) / 2))


def command_of(where: Placed, slot: Slot) -> list[str]:
    """Return one worker's command line, with its rank and the other placeholders filled in."""
    torch = where.torch[slot.rank]
    values = {
        "rank": torch.rank,
        "local_rank": torch.local_rank,
        "world_size": torch.world_size,
        "master_addr": torch.address,
        "master_port": torch.port,
    }
    command = plan.fill(where.plan.command, values)
    return [*command, f"--local_rank={torch.local_rank}"] if where.config.pass_local_rank else command


def _torch(where: Placed, slot: Slot) -> TorchWorld | None:
    return where.torch[slot.rank] if where.config.torch_env else None
