"""Counts of what a rank has done so far, for whoever watches the job, and for its last line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from dadt.control.step_times import StepTimes
from dadt.train.measure import Measure


class Sender(Protocol):
    """A sender of gradients or weights."""

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes to the peers so far, and what they would be without compression."""


class Progress:
    """One rank's sums since the job began."""

    def __init__(self) -> None:
        self.step = 0
        """Optimizer steps that this rank has taken, over all optimizers."""
        self.left_alone = 0
        """Steps of optimizers that DADT leaves alone; each rank may take any number of them."""
        self.samples = 0
        """Samples drawn from shared loaders for training."""
        self.hook_seconds = 0.0
        """Seconds in DADT's hooks around steps, waiting included."""
        self.waits = 0.0
        """Seconds of waiting for exchanges."""
        self.files_missed: Callable[[], Sequence[str]] = tuple
        """The files that this rank alone has written, and that are not there after the job."""
        self.unseen: Callable[[BaseException], str] = lambda error: ""
        """The path in an error which this rank has written and a library does not find; empty if there is none."""
        self.stood = 0.0
        """Seconds without training, as ranks were lost and the others connected again."""
        self.measures: list[Measure] = []
        """Sums of all optimizers so far; one may be collected before the end."""
        self.senders: list[Sender] = []
        self._sent_before = (0, 0)
        self._step_times = StepTimes()

    def stepped(self, now: float, *, left_alone: bool = False) -> None:
        """now: in seconds of a clock that only goes forward."""
        self.step += 1
        self.left_alone += left_alone
        self._step_times.stepped(now)

    def sends_with(self, senders: Iterable[Sender]) -> None:
        """Count what these senders send; what earlier ones sent stays counted."""
        self._sent_before, self.senders = self._sent(), list(senders)

    def numbers(self) -> dict[str, Any]:
        """What whoever watches the job gets to see while this rank trains."""
        sent, plain = self._sent()
        return {
            "samples": self.samples,
            "waited": self._waited,
            "clock": self._step_times.last,
            "sent": sent,
            "plain": plain,
            "late": max((m.late for m in self.measures), default=0),
            "fell_back": sum(m.fell_back for m in self.measures),
            "differed": sum(m.differed for m in self.measures),
            "step_times": self._step_times.describe(),
        }

    def summary(self) -> dict[str, Any]:
        """What the job's last line is made of, once this rank has ended."""
        first = min((m.began for m in self.measures if m.began), default=0.0)
        last = max((m.last for m in self.measures), default=0.0)
        sent, plain = self._sent()
        return {
            **({"steps": steps} if (steps := self.step - self.left_alone) or not self.step else {}),
            "delayed": sum(m.delayed for m in self.measures),
            "wait_fraction": self._waited / (last - first) if last > first else 0.0,
            "why": next((m.why for m in self.measures if m.why), ""),
            "samples": self.samples,
            "seconds": max(0.0, last - first),
            "hook_seconds": self.hook_seconds,
            **({"not_finite": bad} if (bad := sum(m.not_finite for m in self.measures)) else {}),
            **({"differed": found} if (found := sum(m.differed for m in self.measures)) else {}),
            **({"files_missed": len(files), "file_missed": files[0][:4096]} if (files := self.files_missed()) else {}),
            **({"stood": self.stood} if self.stood else {}),
            **({"sent": sent, "plain": plain} if sent != plain else {}),
        }

    @property
    def _waited(self) -> float:
        return sum(m.waited for m in self.measures)

    def _sent(self) -> tuple[int, int]:
        counts = [self._sent_before, *(sender.sent for sender in self.senders)]
        return sum(sent for sent, _ in counts), sum(plain for _, plain in counts)
