"""A plan with a place for every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dadt.config import Config
from dadt.launch.agents import Node
from dadt.launch.hosts.slot import Slot
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
    slots: Sequence[Slot]
    master: tuple[str, int] | None
    secret: str
    """A random secret in hex, known to the launcher, the agents and the workers."""
    why: str = ""
    """The chosen executor, and the reason."""
    restarts: int = 0
    """How often the job has been started again."""
