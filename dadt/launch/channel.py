"""The launcher's end of what connects it to the agent of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dadt.config import Config
from dadt.control.frame import Link
from dadt.launch.hosts.host import Host


class Channel(Protocol):
    """An agent that was started, and the link to it."""

    link: Link

    def hang_up(self) -> None:
        """Close the way to the agent, which ends it; returns at once. Idempotent."""

    def end(self, timeout: float) -> str:
        """Hang up, and wait until the agent is gone; after `timeout` seconds end it by force, as far as one can.

        Returns how it ended, as the rest of a sentence that begins with the host's name: "" if well, else for
        example "the agent was killed by signal 9 (SIGKILL)". Idempotent.
        """


@runtime_checkable
class Noted(Protocol):
    """A channel of whose making the user should know something, as that the host's key was not known."""

    notes: Sequence[str]
    """Each is the rest of a sentence that begins with the host's name."""


@dataclass(frozen=True, slots=True)
class Request:
    """The agents that a job needs."""

    config: Config
    hosts: Sequence[Host]
    command: Sequence[str]
    """Of each worker."""
    job: str
    turned_away: Callable[[str], None] = lambda text: None
    """Is told, by any thread, of strangers who came to where agents are awaited."""

    @property
    def allocated(self) -> bool:
        """A scheduler has named the hosts, and not the user."""
        return any(host.name for host in self.hosts) and not (self.config.hosts or self.config.hostfile)


class Launcher(Protocol):
    """A way to start agents."""

    def launch(self, hosts: list[Host]) -> list[Future[Channel]]:
        """Begin to start one agent per host; returns at once. A future fails with LaunchError, whose message goes
        on after the host's name: "permission denied: ... -> what to do"."""

    def command(self, host: Host) -> str:
        """What is run to start the agent of this host, for people to read."""

    def close(self) -> None:
        """End what is left beside the channels, as an attempt to connect. Idempotent."""


@runtime_checkable
class Herald(Protocol):
    """A launcher at whose hosts somebody waits to hear how the job ended."""

    def conclude(self, code: int, lines: Sequence[str]) -> None:
        """Once all is over, `close` too: the job's exit code, and what was said of its end."""
