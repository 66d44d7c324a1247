"""Interfaces of launchers (classes that start agents), and of the connection to the agent of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dadt.config import Config
from dadt.control.frame import Link
from dadt.launch.hosts.host import Host


class Channel(Protocol):
    """A running agent, as `dadt run` sees it: the link over which frames are exchanged, and methods to end the
    agent."""

    link: Link

    def hang_up(self) -> None:
        """Close the connection, so that the agent ends. Returns at once. Idempotent."""

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
    """Texts for the user, each printed after the host's name."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """All that a launcher needs to know to start the agents of a job."""

    config: Config
    hosts: Sequence[Host]
    command: Sequence[str]
    """Command line that each worker runs."""
    job: str
    turned_away: Callable[[str], None] = lambda text: None
    """Function that is called, in any thread, with a text for the user when an unexpected process connects to the port
    to which agents connect."""
    say: Callable[[str], None] = lambda text: None
    """Function that is called with a text for the user about what the launcher is waiting for."""

    @property
    def allocated(self) -> bool:
        """Whether a scheduler has allocated the hosts, so that the user has not named them."""
        by_user = self.config.hosts or self.config.hostfile or self.config.host_discovery_script
        return any(host.name for host in self.hosts) and not by_user


class Launcher(Protocol):
    """A way to start agents on hosts, such as by ssh."""

    extends: bool
    """Whether `launch` may be called again later, for hosts that join a running job."""

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        """Begin to start one agent per host. Returns at once, with one future per host. The future of a host that
        cannot be used fails with a LaunchError, whose message continues the host's name, such as "permission denied ->
        run ssh-copy-id"."""

    def command(self, host: Host) -> str:
        """Return the command that starts the agent of this host, to be shown to the user."""

    def close(self) -> None:
        """Stop everything except running agents, such as attempts to connect that are still in progress. Idempotent."""


@runtime_checkable
class Herald(Protocol):
    """A launcher that also reports the job's end to its hosts, on each of which a process waits for this report."""

    def conclude(self, code: int, lines: Sequence[str]) -> None:
        """Report the job's exit code, and `lines`, the text about its end. Called after `close`."""
