"""One rank of a job as the launcher knows it: its process, its progress, and whether it is still in the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dadt.control.condition import HELD, TEXTS
from dadt.launch.members.waits import Waiting


@dataclass(slots=True)
class Member:
    """The state of one rank of the job, as far as the launcher knows it."""

    rank: int
    host: str = ""
    pid: int = 0
    state: str = "has not imported torch"
    step: int = -1
    seen: float = 0.0
    """Time of the rank's last sign of life (time.monotonic)."""
    condition: str = ""
    """Why the rank makes no steps, according to the kernel, as a key of condition.TEXTS; empty if no reason is
    known."""
    went_on: float = 0.0
    """Time (time.monotonic) at which the rank was found to go on, after a condition that had held it."""
    claimed: bool = False
    """Whether a process of this rank trains, or has trained."""
    ended: bool = False
    """Whether the rank's process has exited."""
    lost: bool = False
    """Whether the rank is lost, that is, the other ranks continue training without it."""
    joined: bool = False
    """Whether the rank's worker was started while the job was running, in place of a lost one."""
    generation: int = 0
    """Number of the latest generation of ranks that includes this rank. A generation begins each time that ranks
    connect again."""
    images: int = 0
    """Number of times that this rank's process has replaced itself (exec) during training. If ranks do so together,
    their numbers stay equal."""
    gathered: int = 0
    """Number of allgathers that the rank had begun when its script ended."""
    finished: bool = False
    """Whether the rank's script has ended, so that its process only waits for the other ranks."""
    waiting: Waiting = field(default_factory=Waiting)

    def sign(self, state: str, now: float) -> None:
        self.state = state
        self.seen = now

    def start_anew(self, now: float) -> None:
        """Reset the state, because a new worker starts for this rank."""
        self.ended = self.claimed = self.finished = False
        self.step = -1
        self.waiting = Waiting()  # questions of the old worker may never be answered
        self.sign("is started anew", now)

    def went_to(self, step: int, seen: float) -> None:
        if step >= 0:
            self.step = step
            if not (self.ended or self.finished):
                self.state = f"at step {step}"
            self.seen = max(self.seen, seen)

    def found(self, condition: str, now: float) -> None:
        """Note why the rank makes no steps, according to the kernel; empty if no reason is known."""
        if self.held and condition not in HELD:
            self.went_on = now
        elif condition in HELD and not self.held and self.waiting.is_owed:
            self.waiting.acted = now  # until now it did what it had to: wait for the launcher's answer
        self.condition = condition

    def waits(self, now: float) -> bool:
        """Whether the rank waits for other ranks now."""
        return self.waiting.lasts(self.seen, now)

    @property
    def acted(self) -> float:
        """Time of the rank's last sign of life (time.monotonic): a step, the beginning or end of a wait, or the end of
        what had held it, as it tells of a wait only once that has lasted."""
        return max(self.seen, self.waiting.acted, self.went_on)

    @property
    def place(self) -> str:
        return f"pid {self.pid}{f' on {self.host}' if self.host else ''}"

    @property
    def placed(self) -> str:
        return f"rank {self.rank} ({self.place})"

    @property
    def held(self) -> str:
        """Text about the condition that prevents the rank from continuing, for example that it is stopped; empty if
        there is none."""
        return self._condition if self.condition in HELD and not self.ended else ""

    @property
    def standing(self) -> str:
        """Text about the rank's state and its condition."""
        if self.lost:
            return f"lost: {self.state}"
        if self.held:
            return f"{self.held}, {self.state}"
        return f"{self.state} and {self._condition}" if self.condition and not self.ended else self.state

    @property
    def _condition(self) -> str:
        return TEXTS[self.condition].format(place=self.place, pid=self.pid)

    @property
    def named(self) -> str:
        return f"rank {self.rank} ({f'on {self.host}, ' if self.host else ''}{self.standing})"

    def describe(self, now: float) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "state": self.standing,
            "step": self.step,
            "seconds": now - self.seen,
        }
