"""Interfaces of launchers, and of the launcher's connection to the agent of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dadt.config import Config
from dadt.control.frame import Link
from dadt.launch.hosts.host import Host


class Channel(Protocol):
    """A started agent, and the link to it."""

    link: Link

    def hang_up(self) -> None:
        """Close the connection, which ends the agent. Returns at once. Idempotent."""

    def end(self, timeout: float) -> str:
        """Hang up, and wait until the agent is gone. After `timeout` seconds it is killed, where that is possible.

        Returns "" if the agent ended well, else a text to follow the host's name, such as "the agent was killed by
        signal 9 (SIGKILL)". Idempotent.
        """


@runtime_checkable
class ChannelWithNotes(Protocol):
    """A channel with notes for the user about how it was made, such as that the host's key was unknown."""

    notes: Sequence[str]
    """Texts for the user, each to follow the host's name."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request to a launcher for the agents of a job."""

    config: Config
    hosts: Sequence[Host]
    command: Sequence[str]
    """Command line of each worker."""
    job: str
    turned_away: Callable[[str], None] = lambda text: None
    """Called in any thread with a text about a stranger that connected where agents are awaited."""
    say: Callable[[str], None] = lambda text: None
    """Tells the user what is waited for."""

    @property
    def allocated(self) -> bool:
        """Whether the hosts come from a scheduler rather than from the user."""
        by_user = self.config.hosts or self.config.hostfile or self.config.host_discovery_script
        return any(host.name for host in self.hosts) and not by_user


class Launcher(Protocol):
    """A way to start agents."""

    extends: bool
    """Whether `launch` may be called again, for hosts that come into a running job."""

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        """Begin to start one agent per host. Returns at once. A future fails with LaunchError, whose message is a
        text to follow the host's name: "permission denied: ... -> what to do"."""

    def command(self, host: Host) -> str:
        """The command that starts the agent of this host, for users to read."""

    def close(self) -> None:
        """End everything besides the channels, such as attempts to connect. Idempotent."""


@runtime_checkable
class Herald(Protocol):
    """A launcher that reports the job's end to its hosts, where somebody waits for it."""

    def conclude(self, code: int, lines: Sequence[str]) -> None:
        """Report the job's exit code and the text about its end. Called after `close`."""
