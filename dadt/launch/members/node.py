"""One host of a job and its agent, as the launcher knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dadt.launch.hosts.host import Host

END_SECONDS = 5.0
"""Largest number of seconds that an agent needs to end its workers after it has given up the launcher."""


@dataclass(slots=True, eq=False)
class Node:
    """One host of the job and the agent on it."""

    index: int
    host: Host
    is_child: bool = False
    """Whether the agent is a child process of the launcher, so that it has the launcher's environment and notices the
    launcher's end."""
    notes: Sequence[str] = ()
    """Texts for the user about how the connection to the agent was made; each is printed after the host's name."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The agent's report about its host; empty until the agent is ready."""
    address: str = ""
    """Address at which the other hosts reach this host; empty in a job of one host."""
    interface: str = ""
    folder: int | None = None
    """Number of the working folder that this host sees. Hosts that share one folder have the same number. None if
    unknown."""
    ranks: frozenset[int] = frozenset()
    """Ranks of the workers on this host. Frames of the agent may concern no other ranks."""
    state: str = "is not connected"
    heard: float = 0.0
    """Time at which the agent's last frame arrived (time.monotonic)."""
    clock: float = float("-inf")
    """Estimate of the host's uptime minus the launcher's, in seconds. It is too small by the time that the fastest
    frame so far took to arrive."""
    done: bool = False
    """Whether the agent has reported that all of its workers have ended."""
    told: bool = False
    """Whether the agent was asked to end by something other than the launcher, such as a signal on its host."""
    works: bool = False
    """Whether the agent has been ordered to start workers, and has not yet reported that all of them have ended."""
    ended: bool = False
    """Whether the agent is gone or given up, so that no more frames from it are handled."""
    closed: bool = False
    """Whether the agent has closed the connection."""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def failed(self) -> bool:
        """Once an attempt is over: whether the next one should not use this host at once, because its agent was lost or
        asked to end, has not ended its workers, or has not ended in time itself."""
        return self.told or self.works or (self.ended and not self.done)

    def busy_until(self, orphan_timeout: float) -> float:
        """Time (time.monotonic) until which workers may run on the host; 0 if none can run any more. An agent that has
        lost contact with the launcher continues for --orphan-timeout seconds, and then ends its workers."""
        gone = self.done or self.closed or self.is_child
        return 0.0 if gone else self.heard + orphan_timeout + END_SECONDS

    @property
    def reached(self) -> bool:
        """Whether the agent has sent its report about the host."""
        return "version" in self.report
