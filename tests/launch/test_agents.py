"""The launcher's connections to its agents, over sockets at whose other ends a test speaks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future

from harness.patience import PATIENCE

from dadt.control.frame import Frame, Link
from dadt.control.schema import AGENT
from dadt.launch.agents import EXPLAIN_SECONDS, FURTHER_SECONDS, Agents
from dadt.launch.channel import Channel
from dadt.launch.hosts.host import Host


class OneAgent:
    """The connection to one agent."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """meanwhile: called while it is waited for the agent's exit."""
        self.ours, self.agent = socket.socketpair()
        self._writer = self.ours.dup()
        self.link = Link(self.ours.fileno(), self._writer.fileno(), AGENT)
        self.patience = -1.0
        """For how many seconds it was waited at most."""
        self._meanwhile = meanwhile

    def hang_up(self) -> None:
        self.ours.close()
        self._writer.close()

    def end(self, timeout: float) -> str:
        self.patience = timeout
        self._meanwhile()
        self.hang_up()
        return ""

    def say(self, kind: str, **facts: int) -> None:
        self.agent.sendall(Frame(kind, facts).encode())


class AtOnce:
    """Starts agents that are connected at once."""

    extends = False

    def __init__(self, *channels: OneAgent) -> None:
        self._channels = channels

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        futures: list[Future[Channel]] = []
        for channel in self._channels:
            futures.append(Future())
            futures[-1].set_result(channel)
        return futures

    def command(self, host: Host) -> str:
        return ""

    def close(self) -> None:
        pass


def connected(*channels: OneAgent) -> Agents:
    connections = Agents(AtOnce(*channels), [Host(name=f"host{place}") for place in range(len(channels))], 30.0)
    kinds = [frame.kind for _, frame in connections.turn(0.0)]
    assert kinds == ["connected"] * len(channels)
    return connections


def test_what_came_while_it_was_waited_for_an_agents_exit_is_told_before_its_loss() -> None:
    def meanwhile() -> None:
        second.agent.close()
        third.say("heartbeat", port=7)

    first, second, third = OneAgent(meanwhile), OneAgent(), OneAgent()
    connections = connected(first, second, third)
    first.agent.close()
    told: list[tuple[str, str]] = []
    end = time.monotonic() + PATIENCE
    while not told and time.monotonic() < end:
        told = [(node.name, frame.kind) for node, frame in connections.turn(1.0)]
    assert told == [("host2", "heartbeat"), ("host0", "lost"), ("host1", "lost")]
    assert (first.patience, second.patience) == (EXPLAIN_SECONDS, FURTHER_SECONDS)
    connections.close(0.0)
    # Those from which the launcher takes leave have not failed.
    assert [node.failed for node in connections.nodes] == [True, True, False]
    third.agent.close()
