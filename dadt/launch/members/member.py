"""One rank of a job as the launcher knows it: its process, its progress, and whether it is still in the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dadt.control.condition import HELD, TEXTS
from dadt.launch.members.waits import Waiting


@dataclass(slots=True)
class Member:
    """One rank, as the launcher knows it."""

    rank: int
    host: str = ""
    pid: int = 0
    state: str = "has not imported torch"
    step: int = -1
    seen: float = 0.0
    """Time of its last sign of life (time.monotonic)."""
    condition: str = ""
    """Why it makes no steps, according to the kernel: a key of condition.TEXTS, or empty."""
    claimed: bool = False
    """Whether a process of it trains or has trained."""
    ended: bool = False
    """Whether its process has exited."""
    lost: bool = False
    """Whether the others train on without it."""
    joined: bool = False
    """Whether its worker was started in the running job, in place of one that was lost."""
    generation: int = 0
    """The newest generation of ranks in which it was: how often it has met the others again."""
    images: int = 0
    """How often its process, or another rank's before, has replaced itself amid training."""
    finished: bool = False
    """Whether its script is over, so that it waits for the others."""
    waiting: Waiting = field(default_factory=Waiting)

    def sign(self, state: str, now: float) -> None:
        self.state = state
        self.seen = now

    def start_anew(self, now: float) -> None:
        """Note that a new worker starts in its place."""
        self.ended = self.claimed = self.finished = False
        self.step = -1
        self.sign("is started anew", now)

    def went_to(self, step: int, seen: float) -> None:
        if step >= 0:
            self.step = step
            if not (self.ended or self.finished):
                self.state = f"at step {step}"
            self.seen = max(self.seen, seen)

    def waits(self, now: float) -> bool:
        """Whether it has been waiting for other ranks for some time."""
        return self.waiting.lasts(self.seen, now)

    @property
    def acted(self) -> float:
        """Time of its last sign of life (time.monotonic): a step, or that it began or ended to wait."""
        return max(self.seen, self.waiting.acted)

    @property
    def place(self) -> str:
        return f"pid {self.pid}{f' on {self.host}' if self.host else ''}"

    @property
    def held(self) -> str:
        """The condition that keeps it from going on, as text; empty if there is none."""
        return self._condition if self.condition in HELD and not self.ended else ""

    @property
    def standing(self) -> str:
        """Its state and its condition, as text."""
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
