"""Collects the figures of each rank (steps, speed, memory, waiting) while the job runs, for the live view, `dadt ps`
and the report."""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from dadt.launch.actions import Event, Outbox
from dadt.launch.members.member import Member
from dadt.launch.monitor.bad_links import BadLinks
from dadt.launch.monitor.host_links import HostLinks
from dadt.launch.monitor.printed import BAR

WINDOW_SECONDS = 5.0
"""Length in seconds of the window over which speeds are averaged."""
SLOW = 1.1
"""A rank counts as the slowest if its steps take this many times as long as those of the median of the other ranks,
both without the time of waiting."""
LAG_SECONDS = 1.0
"""A rank also counts as the slowest if it is behind the median rank by more than LAG_STEPS steps plus the steps that
the median rank makes in this many seconds."""
LAG_STEPS = 2
LINE_BYTES = 1024
LOOK_SECONDS = 1.0
"""Minimum seconds between two searches for links between hosts that slow down the averaging."""
ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class View(Protocol):
    """Interface of objects that display or record the figures that a Watch has collected, while the job runs."""

    def tick(self) -> float:
        """Show or record the current figures, if that is due. Returns the seconds until the next call is due."""

    def close(self) -> None:
        """Show or record what is still missing, and free the view's resources. May be called repeatedly."""


class Mark(NamedTuple):
    """The progress of a rank at one time, as the rank has reported it."""

    seen: float
    """Time at which the rank's report arrived at the launcher (time.monotonic)."""
    step: int
    samples: float
    waited: float
    clock: float


class Speed(NamedTuple):
    """A rank's speed between two reports, by the rank's own clock."""

    steps: float
    samples: float
    wait: float
    """Share of the time spent waiting for communication."""

    @classmethod
    def between(cls, first: Mark, last: Mark) -> Speed:
        seconds = max(last.clock - first.clock, 1e-9)
        wait = min(1.0, max(0.0, (last.waited - first.waited) / seconds))
        return cls((last.step - first.step) / seconds, (last.samples - first.samples) / seconds, wait)


@dataclass(slots=True, eq=False)
class Gauge:
    """The figures of one rank: progress, speed, memory, output and exit code."""

    member: Member
    memory: int = 0
    """Resident bytes of the rank's training process."""
    peak_memory: int = 0
    samples: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the rank's last report: sums since its start, such as bytes sent, and `late`, which says by how many
    steps its last gradients were delayed."""
    code: int | None = None
    """Exit code of the rank's process, or -n if signal n ended it; None until it has ended."""
    failed: bool = False
    """Whether the rank failed by itself, not because another rank failed or because all workers were stopped."""
    secondary: bool = False
    """Whether the rank reported that it ended because of another rank's failure."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The summary that the rank reported at the end of its training; empty before that."""
    lost_at: float | None = None
    """Time, in seconds since the epoch, at which the other ranks began to continue training without this rank; None if
    they did not."""
    _printed: bytes = b""
    _marks: deque[Mark] = field(default_factory=deque)
    _first: Mark | None = None

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def host(self) -> str:
        return self.member.host

    @property
    def line(self) -> str:
        """The last progress bar or non-empty line that the rank printed, without escape sequences."""
        parts = re.split(rb"[\r\n]+", ESCAPES.sub(b"", self._printed))
        parts = [part for part in reversed(parts) if part.strip()]
        text = next(filter(BAR.search, parts), next(iter(parts), b"")).decode(errors="replace")
        return "".join(c if c.isprintable() else " " for c in text).strip()

    @property
    def trains(self) -> bool:
        return self.member.step >= 0 and not self.member.ended and not self.member.finished

    def printed(self, data: bytes) -> None:
        """Record output of the rank. This is called for all output, so it only stores the end of the output and does
        not split it into lines."""
        if data.strip():
            before = b"" if self._printed.endswith(b"\n") else self._printed  # the end of a line may arrive later
            self._printed = (before + data)[-LINE_BYTES:]

    @property
    def last(self) -> Mark | None:
        """The latest report of this rank's progress; None if there is none."""
        return self._marks[-1] if self._marks else None

    def mark(self, step: int, numbers: Mapping[str, Any], now: float) -> None:
        self.numbers = numbers
        self.samples = numbers.get("samples", 0.0)
        self._marks.append(Mark(now, step, self.samples, numbers.get("waited", 0.0), numbers.get("clock", now)))
        self._first = self._first or self._marks[0]
        # One report from before the window is kept, so that a slow rank, which reports rarely, has a speed as well.
        while len(self._marks) > 2 and self._marks[1].seen < now - WINDOW_SECONDS:
            self._marks.popleft()

    def speed(self, now: float) -> Speed | None:
        """Return the rank's speed over the last seconds; None if it is unknown, or if training is over."""
        if len(self._marks) < 2 or self.member.ended or self.member.finished:
            return None
        first, last = self._marks[0], self._marks[-1]
        usual = (last.seen - first.seen) / max(1, len(self._marks) - 1)
        if now - last.seen > max(WINDOW_SECONDS, 3 * usual):
            return Speed(0.0, 0.0, 0.0)
        return Speed.between(first, last)

    def mean_speed(self) -> Speed | None:
        """Return the rank's mean speed over all of its training so far; None if unknown."""
        if self._first is None or self._first is self._marks[-1]:
            return None
        return Speed.between(self._first, self._marks[-1])

    def own_seconds(self, now: float) -> float:
        """Return the seconds that a step of this rank takes without waiting for other ranks; 0 if unknown."""
        speed = self.speed(now)
        return (1.0 - speed.wait) / speed.steps if speed and speed.steps > 0 else 0.0

    def describe(self, now: float) -> dict[str, Any]:
        speed = self.speed(now)
        return {
            **self.member.describe(now),
            "lost": self.lost_at,
            "memory": self.memory,
            "line": self.line,
            "code": self.code,
            "steps_per_second": speed.steps if speed else None,
            "samples_per_second": speed.samples if speed else None,
            "wait_fraction": speed.wait if speed else None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A rank that was lost while the other ranks continued training."""

    rank: int
    host: str
    step: int
    """Optimizer steps that the rank had done; -1 if none."""
    time: float
    why: str
    replaced: float | None = None
    """Time, in seconds since the epoch, at which a new worker joined in place of the lost one; None if none did."""


class Watch:
    """Tracks the figures of all ranks, the state of the job, and which ranks were lost."""

    def __init__(self, members: Sequence[Member], outbox: Outbox, now: float, begin: float) -> None:
        """now, begin: the current time, as time.monotonic and in seconds since the epoch."""
        self._outbox = outbox
        self.gauges = [Gauge(member) for member in members]
        self.links = HostLinks(members)
        self._bad_links = BadLinks()
        self._links_due = now
        self.state = "starting"
        self.begin = begin
        self._since_epoch = begin - now
        self.losses: list[Loss] = []
        """Ranks that were lost while the others continued training, in order of time."""
        self.generations: list[Mapping[str, Any]] = []
        """An entry for each time that the ranks have connected again, with the time, the ranks that were lost, the
        ranks that were left, and the reason."""

    def stops(self, why: str, grace: float) -> None:
        """Record that all workers have been ordered to end. why: reason for the order. grace: seconds until they are
        killed."""
        self.state = "stopping"
        self._outbox.note("stop", why=why, grace=grace)

    def regroups(self, lost: Sequence[Member], why: str, now: float) -> None:
        """Record that the ranks connect again, and continue training without the lost ones if there are any."""
        at = self._since_epoch + now
        losses = [Loss(rank=m.rank, host=m.host, step=m.step, time=at, why=why) for m in lost]
        self.losses += losses
        for loss in losses:
            self.gauges[loss.rank].lost_at = at
        left = [gauge.member for gauge in self.gauges if not gauge.member.lost]
        ranks = {"lost": [loss.rank for loss in losses], "left": [member.rank for member in left]}
        facts = {"generation": left[0].generation, **ranks, "why": why}
        self.generations.append({"time": at, **facts})
        self._outbox.note("regroup", **facts)

    def joins(self, members: Iterable[Member], now: float) -> None:
        """Record that new workers of these ranks have joined the running job."""
        for member in members:
            at, self.gauges[member.rank].lost_at = self._since_epoch + now, None
            self.losses = [
                replace(loss, replaced=at) if (loss.rank, loss.replaced) == (member.rank, None) else loss
                for loss in self.losses
            ]
            self._outbox.note("join", generation=member.generation, rank=member.rank, pid=member.pid, host=member.host)

    def turn(self, now: float) -> None:
        """Warn the user about links between hosts that slow down the averaging. Call regularly."""
        if now < self._links_due:
            return
        self._links_due = now + LOOK_SECONDS
        waits = [speed.wait for gauge in self.gauges if (speed := gauge.speed(now)) is not None] if self.links else []
        if waits and (text := self._bad_links.find(self.links.recent(now), statistics.median(waits), now)):
            self._outbox.say(text, "warning")
            self._outbox.note("link", text=text)

    def steps(self) -> tuple[int, int]:
        """Return the lowest and the highest number of steps that any rank has done."""
        steps = [max(0, gauge.member.step) for gauge in self.gauges if not gauge.member.lost]
        return min(steps), max(steps)

    def slowest(self, now: float) -> Gauge | None:
        """Return the Gauge of the rank for which the other ranks wait; None if no rank is clearly slower than the
        others."""
        training = [gauge for gauge in self.gauges if gauge.trains]
        if len(training) < 2:
            return None
        awaited = [gauge for gauge in training if not gauge.member.waits(now)]
        if len(awaited) == 1:
            return awaited[0]
        step = statistics.median(gauge.member.step for gauge in training)
        rate = statistics.median(speed.steps if (speed := gauge.speed(now)) else 0.0 for gauge in training)
        behind = min(training, key=lambda gauge: gauge.member.step)
        if behind.member.step < step - LAG_STEPS - rate * LAG_SECONDS:
            return behind
        own = {gauge.rank: seconds for gauge in training if (seconds := gauge.own_seconds(now)) > 0}
        if len(own) < 2:
            return None
        rank = max(own, key=own.__getitem__)
        others = [seconds for other, seconds in own.items() if other != rank]
        return self.gauges[rank] if own[rank] > SLOW * statistics.median(others) else None

    def by_pace(self, now: float) -> list[Gauge]:
        """Return the Gauges of all ranks in this order: ranks that failed, then the others by speed with the slowest
        first, and last those that have ended well."""
        slowest = self.slowest(now)

        def order(gauge: Gauge) -> tuple[bool, bool, bool, bool, float, int]:
            ended = gauge.code == 0 or gauge.member.finished
            waits, own = gauge.member.waits(now), gauge.own_seconds(now)
            return not gauge.code, ended, gauge is not slowest, waits, -own, gauge.rank

        return sorted(self.gauges, key=order)

    def printed(self, event: Event) -> None:
        self.gauges[event.frame["rank"]].printed(event.frame.body)

    def started(self, event: Event) -> None:
        self.state = "running"

    def beat(self, event: Event) -> None:
        for rank, memory in event.frame.get("memory", {}).items():
            gauge = self.gauges[int(rank)]
            gauge.memory = memory
            gauge.peak_memory = max(gauge.peak_memory, memory)

    def numbers(self, event: Event) -> None:
        rank, numbers = event.frame["rank"], event.frame["numbers"]
        self.gauges[rank].mark(event.frame["step"], numbers, event.now)
        if links := numbers.get("links"):
            self.links.hear(rank, links, event.now)

    def done(self, event: Event) -> None:
        self.gauges[event.frame["rank"]].summary = event.frame["summary"]

    def failed(self, event: Event) -> None:
        gauge, frame = self.gauges[event.frame["rank"]], event.frame
        gauge.secondary = gauge.secondary or frame.get("secondary", False)
        gauge.failed = gauge.failed or not (frame.get("secondary") or frame.get("thread"))

    def exit(self, event: Event) -> None:
        gauge, frame = self.gauges[event.frame["rank"]], event.frame
        gauge.code = frame["code"]
        others = frame["stopped"] or gauge.secondary
        gauge.failed = gauge.code != 0 and (gauge.failed or not others)
        gauge.member.step = max(gauge.member.step, frame["step"])
        gauge.memory = 0
        gauge.peak_memory = max(gauge.peak_memory, frame["peak_memory"])
