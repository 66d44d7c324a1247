"""Counts a rank's steps, samples, waits and bytes so far, for users who watch the job and for the job's last line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Protocol

from dadt.comm.link_totals import LinkRecord
from dadt.control.step_times import StepTimes
from dadt.train.measure import Measure


class Sender(Protocol):
    """Interface of an object that sends gradients or weights to peers."""

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes sent to the peers so far, and bytes that the same values would take without compression."""


class Progress:
    """Total steps, samples, times and bytes of one rank since the job began."""

    def __init__(self) -> None:
        self.step = 0
        """Number of optimizer steps that this rank has taken, over all optimizers."""
        self.left_alone = 0
        """Number of steps of optimizers that DADT does not manage, which may differ between ranks."""
        self.samples = 0
        """Number of samples drawn from shared loaders for training."""
        self.hook_seconds = 0.0
        """Seconds spent in DADT's hooks around steps, including waits."""
        self.waits = 0.0
        """Seconds spent waiting for exchanges."""
        self.files_missed: Callable[[], Sequence[str]] = tuple
        """Function that returns the paths of files that only this rank has written and that will be missing after the
        job."""
        self.unseen: Callable[[BaseException], str] = lambda error: ""
        """Function that takes an error and returns the path of the missing file that it names, if this rank has written
        the file but a library cannot find it; otherwise an empty string."""
        self.stood = 0.0
        """Seconds without training, in which ranks reconnected after a loss."""
        self.measures: list[Measure] = []
        """Time measurements of all optimizers so far, including those garbage-collected meanwhile."""
        self.senders: list[Sender] = []
        self.links = LinkRecord()
        self._sent_before = (0, 0)
        self._step_times = StepTimes()

    def stepped(self, now: float, *, left_alone: bool = False) -> None:
        """Count one optimizer step. now: seconds of a monotonic clock. left_alone: whether DADT does not manage the
        optimizer."""
        self.step += 1
        self.left_alone += left_alone
        self._step_times.stepped(now)

    def sends_with(self, senders: Iterable[Sender]) -> None:
        """Count the bytes that these senders send, from now on; bytes of earlier senders stay in the total."""
        self._sent_before, self.senders = self._sent(), list(senders)

    def numbers(self, last: bool = False) -> dict[str, Any]:
        """Return the numbers that users who watch the job see while this rank trains. last: whether the rank has
        ended."""
        sent, plain = self._sent()
        return {
            "samples": self.samples,
            "waited": self.waited,
            "clock": self._step_times.last,
            "sent": sent,
            "plain": plain,
            "late": max((m.late for m in self.measures), default=0),
            "fell_back": sum(m.fell_back for m in self.measures),
            "differed": sum(m.differed for m in self.measures),
            "step_times": self._step_times.describe(),
            **({"links": links} if (links := self.links.news(monotonic(), last)) else {}),
        }

    def summary(self) -> dict[str, Any]:
        """Return the numbers for the job's last line, once this rank has ended."""
        first = min((m.began for m in self.measures if m.began), default=0.0)
        last = max((m.last for m in self.measures), default=0.0)
        sent, plain = self._sent()
        return {
            **({"steps": steps} if (steps := self.step - self.left_alone) or not self.step else {}),
            "delayed": sum(m.delayed for m in self.measures),
            "wait_fraction": self.waited / (last - first) if last > first else 0.0,
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
    def waited(self) -> float:
        """Seconds that this rank has waited for exchanges, over all optimizers and since their first steps."""
        return sum(m.waited for m in self.measures)

    def _sent(self) -> tuple[int, int]:
        counts = [self._sent_before, *(sender.sent for sender in self.senders)]
        return sum(sent for sent, _ in counts), sum(plain for _, plain in counts)
