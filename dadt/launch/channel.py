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
    """A running agent, from the launcher's side: the link for frames, and how to end the agent."""

    link: Link

    def hang_up(self) -> None:
        """Close the connection, which makes the agent end. Returns at once. Idempotent."""

    def end(self, timeout: float) -> str:
        """Close the connection, and wait until the agent is gone. After `timeout` seconds the agent is killed, where
        that is possible. Returns "" if the agent ended well, else a text to follow the host's name, such as "the agent
        was killed by signal 9 (SIGKILL)". Idempotent.
        """


@runtime_checkable
class ChannelWithNotes(Protocol):
    """A channel that has notes for the user about how the connection was made, such as that the host's key was
    unknown."""

    notes: Sequence[str]
    """Texts for the user, each to follow the host's name."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A launcher's task: to start the agents of one job."""

    config: Config
    hosts: Sequence[Host]
    command: Sequence[str]
    """Command line that each worker runs."""
    job: str
    turned_away: Callable[[str], None] = lambda text: None
    """Called, in any thread, with a text for the user when an unexpected process connects to the port where the
    launcher awaits its agents."""
    say: Callable[[str], None] = lambda text: None
    """Called with a text for the user about what the launcher is waiting for."""

    @property
    def allocated(self) -> bool:
        """Whether the hosts come from a scheduler's allocation rather than from the user."""
        by_user = self.config.hosts or self.config.hostfile or self.config.host_discovery_script
        return any(host.name for host in self.hosts) and not by_user


class Launcher(Protocol):
    """A way to start agents on hosts, such as by ssh."""

    extends: bool
    """Whether `launch` may be called again, for hosts that join a running job."""

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        """Begin to start one agent per host. Returns at once, with one future per host. A future fails with
        LaunchError, whose message is a text to follow the host's name: "permission denied: ... -> what to do"."""

    def command(self, host: Host) -> str:
        """Return the command that starts the agent of this host, for users to read."""

    def close(self) -> None:
        """Stop everything except the channels, such as attempts to connect that are still running. Idempotent."""


@runtime_checkable
class Herald(Protocol):
    """A launcher that also reports the job's end to its hosts, because a process on each host waits for it."""

    def conclude(self, code: int, lines: Sequence[str]) -> None:
        """Report the job's exit code, and `lines`, the text about its end. Called after `close`."""
