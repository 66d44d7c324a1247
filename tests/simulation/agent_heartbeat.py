"""The heartbeats between hosts, as the agent of one sends and hears them (dadt/launch/agent/host_heartbeat.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dadt.control.frame import Frame
from dadt.launch.agent.other_hosts import OtherHosts
from simulation.world import address_of

if TYPE_CHECKING:
    from simulation.agent import Agent


class AgentHeartbeat:
    """What one host hears of the others."""

    def __init__(self, agent: Agent, port: int, timeout: float) -> None:
        """port: where it sends and receives heartbeats. timeout: seconds after which another host is silent."""
        self._agent, self.port = agent, port
        self._others = OtherHosts(agent.index, timeout)
        self._mail: set[tuple[str, int]] = set()
        """From where heartbeats have come while this agent was stopped."""

    def begin(self, hosts: Sequence[Any]) -> None:
        """These hosts send heartbeats from now on."""
        self._others.begin(hosts, self._agent.world.now)

    def hear(self, place: tuple[str, int]) -> None:
        """A heartbeat of another host has come from this address and port."""
        if self._agent.process.stops:
            self._mail.add(place)
        elif self._agent.process.alive and (host := self._others.by_place.get(place)) is not None:
            self._others.hear(host.index, self._agent.world.now)

    def turn(self, now: float) -> list[Frame]:
        """Send heartbeats if they are due. Returns what the launcher is told of other hosts."""
        if self._mail:
            mail, self._mail = sorted(self._mail), set()
            for place in mail:
                self.hear(place)
        agent = self._agent
        if self._others.is_beat_due(now):
            for other in agent.job.agents:
                if other is not agent and agent.job.network.reaches(agent.machine, other.machine):
                    other.hear_host((address_of(agent.machine), self.port))
        return self._others.turn(now)
