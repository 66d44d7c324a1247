"""One host of a job and its agent, as the launcher knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dadt.launch.hosts.host import Host


@dataclass(slots=True, eq=False)
class Node:
    """One host of the job and its agent."""

    index: int
    host: Host
    is_child: bool = False
    """Whether the agent is a child of this process, and so has its environment and sees its end."""
    notes: Sequence[str] = ()
    """Texts for the user about how the agent was reached, each to follow the host's name."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The agent's report about its host; empty until it is ready."""
    address: str = ""
    """Address at which the other hosts reach it; empty in a job of one host."""
    interface: str = ""
    folder: int | None = None
    """A number that hosts have in common that see the same working folder; None if it is not known."""
    ranks: frozenset[int] = frozenset()
    """Ranks of its workers, the only ones of which it may speak."""
    state: str = "is not connected"
    heard: float = 0.0
    """Time of its last frame (time.monotonic)."""
    clock: float = float("-inf")
    """Its clock minus this one's, in seconds: a lower bound, off by the travel time of the fastest frame."""
    done: bool = False
    """Whether it has reported that all of its workers have ended."""
    told: bool = False
    """Whether somebody other than the launcher has asked it to end."""
    works: bool = False
    """Whether it was ordered to start workers, and has not reported yet that all of them have ended."""
    ended: bool = False
    """Whether nothing more comes from it."""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def failed(self) -> bool:
        """Whether its workers, which it had, can run there no more."""
        return self.told or (self.ended and not self.done)

    @property
    def reached(self) -> bool:
        """Whether its agent has reported about its host."""
        return "version" in self.report
