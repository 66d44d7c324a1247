"""Decides which agents are still alive, and whether an agent may send the frame that it sent."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.control.absence import Absence
from dadt.control.frame import Frame
from dadt.launch.members.node import Node

BEATS = 6
"""Number of heartbeats that the launcher sends within the orphan timeout, after which an agent that hears nothing gives
up the launcher."""


class Contact:
    """Tracks when each agent last sent something, and when the launcher's next heartbeat is due."""

    def __init__(self, nodes: Sequence[Node], orphan_timeout: float, now: float) -> None:
        self._nodes = nodes
        self._orphan_timeout = orphan_timeout
        self._absence = Absence(now)
        self._beat_at = now

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats of the launcher."""
        return self._orphan_timeout / BEATS

    def is_beat_due(self, now: float) -> bool:
        """Return whether a heartbeat to the agents is due, and count it as sent if so."""
        due = now >= self._beat_at
        if due:
            self._beat_at = now + self.beat_seconds
        return due

    def excuse(self, now: float) -> None:
        """Count all agents as heard just now if this process itself did not run for a while, because it was suspended
        or blocked by a slow reader, and so could not read their frames."""
        if self._absence.has_ended(self._orphan_timeout, now):
            for node in self._nodes:
                node.heard = now

    def hear(self, node: Node, frame: Frame, uptime: float) -> str:
        """Check an agent's frame, and record what it says about the agent. Returns the reason if the frame is not
        allowed and the connection has to end; empty if the frame may be handled.

        uptime: of the launcher's host.
        """
        if others := _named(frame) - node.ranks:
            return f"it spoke of rank {min(others)}, which is not on its host ({frame.kind!r})"
        if (peer := frame.get("peer", 0)) >= len(self._nodes):
            return f"it spoke of host {peer} of the job ({frame.kind!r})"
        if "clock" in frame.header:
            node.clock = max(node.clock, frame["clock"] - uptime)
        node.done = node.done or frame.kind == "end"
        node.told = node.told or frame.kind == "preempted" or (frame.kind == "end" and frame["signal"] > 0)
        return ""

    def silent(self, now: float) -> list[tuple[Node, str]]:
        """Return the agents that have been silent for too long, each with a text that says so. Agents that have not
        reported about their host yet are not included, since they may be busy for long, for example with the user's
        prologue command."""
        patience = self._orphan_timeout
        silent = [node for node in self._nodes if now - node.heard > patience and node.report and not node.ended]
        return [(node, f"no sign of life for {now - node.heard:.0f} s") for node in silent]


def _named(frame: Frame) -> set[int]:
    """Return the ranks that an agent's frame is about."""
    if frame.kind == "beat":
        return set(map(int, {*frame["steps"], *frame["memory"], *frame["conditions"]}))
    return {frame["rank"]} if "rank" in frame.header else set()
