"""Which agents are still there, and say only what they may: what is decided of the connections to them."""

from __future__ import annotations

from collections.abc import Sequence

from dadt.control.frame import Frame
from dadt.launch.members.node import Node

BEATS = 6
"""Number of heartbeats that launcher and agent each send within the orphan timeout, after which the other side counts
as lost."""


class Contact:
    """The signs of life of all agents, and the launcher's own."""

    def __init__(self, nodes: Sequence[Node], orphan_timeout: float, now: float) -> None:
        self._nodes = nodes
        self._orphan_timeout = orphan_timeout
        self._turned = now
        self._beat_at = now

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats."""
        return self._orphan_timeout / BEATS

    def is_beat_due(self, now: float) -> bool:
        """Whether to send a heartbeat to the agents. Said once for each."""
        due = now >= self._beat_at
        if due:
            self._beat_at = now + self.beat_seconds
        return due

    def excuse(self, now: float) -> None:
        """Do not count the time during which this process itself did not run (suspended, or blocked by a slow reader)
        as silence of the agents."""
        if now - self._turned > self._orphan_timeout / 2:
            for node in self._nodes:
                node.heard = now
        self._turned = now

    def hear(self, node: Node, frame: Frame, epoch: float) -> str:
        """Note a frame. Returns why it ends the connection; empty if it may be handled.

        epoch: the time in seconds since the epoch.
        """
        if others := _named(frame) - node.ranks:
            return f"it spoke of rank {min(others)}, which is not on its host ({frame.kind!r})"
        if (peer := frame.get("peer", 0)) >= len(self._nodes):
            return f"it spoke of host {peer} of the job ({frame.kind!r})"
        if "clock" in frame.header:
            node.clock = max(node.clock, frame["clock"] - epoch)
        node.done = node.done or frame.kind == "end"
        node.told = node.told or frame.kind == "preempted" or (frame.kind == "end" and frame["signal"] > 0)
        return ""

    def silent(self, now: float) -> list[tuple[Node, str]]:
        """The agents that are given up, each with the reason. One that is not ready yet may be busy for long, for
        example with the prologue."""
        watched = [node for node in self._nodes if node.report and not node.ended]
        silences = [(node, now - node.heard) for node in watched]
        return [(node, f"no sign of life for {long:.0f} s") for node, long in silences if long > self._orphan_timeout]


def _named(frame: Frame) -> set[int]:
    """Return the ranks that an agent's frame is about."""
    if frame.kind == "beat":
        return {int(rank) for facts in ("steps", "memory", "conditions") for rank in frame[facts]}
    return {frame["rank"]} if "rank" in frame.header else set()
