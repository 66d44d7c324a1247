"""A plan with a place for every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dadt.config import Config
from dadt.launch.agents import Node
from dadt.launch.hosts.slot import Room, Slot
from dadt.launch.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A plan with a place for every worker."""

    plan: Plan
    config: Config
    """The configuration with all choices made that must be the same on all ranks."""
    job: str
    logs: Path
    nodes: Sequence[Node]
    slots: list[Slot]
    """The place of each worker, by rank. A host that comes into the running job changes those that it takes over."""
    master: tuple[str, int] | None
    secret: str
    """A random secret in hex, known to the launcher, the agents and the workers."""
    why: str = ""
    """The chosen executor, and the reason."""
    restarts: int = 0
    """How often the job has been started again."""


def room(node: Node, config: Config) -> Room:
    """The room that a host offers, from the report of its agent."""
    return Room(
        host=node.name,
        slots=node.host.slots,
        gpus=node.report["gpus"] if config.gpu_visibility == "one" else (),
        cores=node.report["cores"],
        machine=node.report["machine"],
    )
