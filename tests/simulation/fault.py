"""What all faults of a simulated job have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from simulation.job import SimulatedJob

FOR_GOOD = float("inf")
HEARD_SECONDS = 3.0
"""When all hosts have heard each other: a way that is cut before is found as the hosts are tried at the start."""
SOON_SECONDS = 2.5
"""A failure within this time after the first one may come before it is known."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has happened, and whom it makes guilty."""

    at: float
    text: str
    ranks: frozenset[int] = frozenset()
    """Ranks that may be lost or blamed for it."""
    hosts: frozenset[int] = frozenset()
    """Hosts of which the same is true, and of their ranks."""
    near: frozenset[int] = frozenset()
    """Hosts that others may not hear for it."""
    until: float = FOR_GOOD
    """When it is over; infinite where it lasts for good, or leaves nothing that could go on."""
    tries: str = ""
    """Whose patience it tries, so that it makes guilty only once that is over: `ranks`, which wait for each other, or
    `lines`, of which one end gets no answer. Empty where it makes guilty at once."""
    fatal: bool = False
    """Whether a rank that trains ends by it at once, and not well."""
    held: bool = False
    """Whether a rank is stopped for good by it, as its agent sees."""
    gone: bool = False
    """Whether a host's agent is lost by it, of which the launcher hears."""
    noticed: float = 0.0
    """Seconds until it does at the latest."""
    hinders: bool = True
    """Whether it may keep hosts from joining, or from joining soon."""
    user: bool = False
    """Whether the user, or who runs the machines, ends the job by it."""
    stays: bool = False
    """Whether it is still there, if it is not over, when the job starts again."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens so many seconds after the first workers were started, or after the start of `dadt run`."""

    silences: ClassVar[bool] = True
    """Whether its hosts may not hear others for it."""
    delays: ClassVar[bool] = False
    """Whether the launcher may hear of hosts later for it."""
    hinders: ClassVar[bool] = True
    """Whether hosts may not join soon, or not at all, for it."""
    stays: ClassVar[bool] = False
    """Whether it outlasts an attempt to run the job."""
    from_start: ClassVar[bool] = False
    """Whether its time begins with `dadt run` in any case."""
    at: float

    def strike(self, job: SimulatedJob) -> None:
        """Let it happen."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """How long it lasts; 0 if it does not pass."""
        lasting: float = getattr(self, "lasting", 0.0)
        return 0.0 if lasting == FOR_GOOD else lasting

    def _struck(self, job: SimulatedJob, text: str, **guilt: object) -> None:
        job.world.note("fault", text)
        until = job.world.now + getattr(self, "lasting", FOR_GOOD)
        named = ("host", "other") if self.silences else ()
        near = frozenset({getattr(self, name) for name in named if hasattr(self, name)})
        struck = Struck(job.world.now, text, near=near, until=until, hinders=self.hinders, stays=self.stays, **guilt)  # type: ignore[arg-type]
        job.invariants.struck.append(struck)


def host_guilt(*hosts: int) -> dict[str, frozenset[int]]:
    """The guilt of whole hosts, and so of their ranks."""
    return {"hosts": frozenset(hosts)}


def later(job: SimulatedJob, seconds: float, do: Callable[[], None]) -> None:
    if seconds != FOR_GOOD:
        job.world.after(seconds, do)
