"""Divides the samples of each step among ranks in proportion to how fast they train (`--batch speed`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from time import perf_counter

from dadt.inject.data.share import Fractions, StepShare
from dadt.train.runtime import Runtime

FIRST, STEPS = 3, 20
"""Number of first steps that are not measured, as they are slow, and least number of steps that are measured."""
RECENT = 200
"""Number of steps over which the median is taken: a few that also save or evaluate do not matter."""
CHANGE = 0.1
"""A rank's speed has changed if it differs by more than this part of what it was."""
LISTED = 8
"""Largest number of ranks whose shares are listed one by one."""


class Speeds:
    """Measures how many samples each rank trains on per second, from which all ranks compute the same division of a
    step: once STEPS steps are measured, and at the beginning of later passes.

    Only time in which a rank does not wait for others counts. Each step has as many samples as with equal parts, so
    each sample has the same weight in the average as in one process.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ranks = runtime.ranks
        self._is_wanted = runtime.ranks.config.batch == "speed"
        self._speeds: tuple[float, ...] = ()  # by rank of the job; empty until measured
        self._fractions: Fractions = ()
        # a later step of the running pass, and the parts that apply from then on
        self._later: tuple[int, Fractions] = (0, ())
        self._divided = 0  # steps of the running pass whose samples are divided
        self._steps = -FIRST  # measured steps since parts have changed; equal on all ranks
        self._seconds: deque[float] = deque(maxlen=RECENT)  # seconds per sample in each of the newest steps
        self._last: tuple[int, float] | None = None  # samples of the step under way, and when it began

    def leaves_equal(self, loader: str) -> None:
        """Tell the user that this loader's samples are divided equally among all ranks."""
        if self._is_wanted:
            self._ranks.say(
                f"{loader}: --batch speed divides no streams, groups and single items: ranks get as many", "warning"
            )

    def fractions(self) -> Fractions:
        """Return each rank's part of the next step's samples. Call it once for each step."""
        step, fractions = self._later
        if fractions and self._divided >= step:
            self._fractions, self._later = fractions, (0, ())
        self._divided += 1
        return self._fractions

    def pass_begins(self) -> None:
        """Called on all ranks before a pass, between the same two steps."""
        if self._later[1]:
            self._fractions, self._later = self._later[1], (0, ())
        self._divided = 0
        self._last = None
        if self._is_wanted and self._speeds and self._steps >= STEPS:
            self._measure()
            self._fractions, self._later = self._later[1] or self._fractions, (0, ())

    def drew(self, piece: StepShare) -> None:
        """Called when the script gets the batch of a step."""
        if not self._is_wanted or not self._runtime.script.on_training_thread:
            return
        now = perf_counter() - self._ranks.progress.waits
        if self._last is not None:
            samples, begun = self._last
            self._steps += 1
            if samples and self._steps > 0:
                self._seconds.append((now - begun) / samples)
        self._last = piece.samples, now
        if self._steps == STEPS and not self._speeds:
            self._measure()
            self._last = None

    def _measure(self) -> None:
        """Tell the other ranks this rank's speed, and wait for theirs."""
        speed = 1 / max(median(self._seconds or [1.0]), 1e-9)
        lanes = self._ranks.collect("speeds", [self._ranks.world.rank, speed, self._divided])
        told = {rank: own for rank, *own in lanes}
        size = self._ranks.world.world_size
        before = self._speeds or (sum(each[0] for each in told.values()) / len(told),) * size
        speeds = tuple(told[rank][0] if rank in told else before[rank] for rank in range(size))
        if self._speeds and all(abs(now / was - 1) <= CHANGE for now, was in zip(speeds, before, strict=True)):
            return
        self._speeds = speeds
        self._steps = 0
        self._seconds.clear()
        fractions = [each / sum(speeds) for each in speeds]
        self._later = (max(each[1] for each in told.values()), fractions)
        self._ranks.say(f"--batch speed: {_listed(fractions)}")


def _listed(fractions: Sequence[float]) -> str:
    """Return how much of each step's samples ranks get, as text."""
    if len(fractions) <= LISTED:
        parts = ", ".join(f"{100 * each:.1f} %" for each in fractions)
        return f"of each step's samples ranks get {parts}, by what they train on in a second"
    least, most = (choose(range(len(fractions)), key=fractions.__getitem__) for choose in (min, max))
    return (
        f"of each step's samples ranks get from {100 * fractions[least]:.2f} % (rank {least}) to"
        f" {100 * fractions[most]:.2f} % (rank {most}), by what they train on in a second"
    )
