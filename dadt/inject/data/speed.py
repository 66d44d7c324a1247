"""Divides the samples of each step among ranks in proportion to how fast they train (`--batch speed`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from time import perf_counter

from dadt.inject.data.share import Fractions, StepShare
from dadt.train.runtime import Runtime

FIRST, STEPS = 3, 20
"""FIRST: number of steps at the start that are not measured, because they are slow. STEPS: number of steps that are
measured before the first division by speed, and between two divisions."""
RECENT = 200
"""Number of the latest steps whose median is a rank's speed. A few slow ones among them, in which the script also saves
or evaluates, do not affect the median."""
CHANGE = 0.1
"""A new division is made only if a rank's speed has changed by more than this fraction."""
LISTED = 8
"""Largest number of ranks for which the user is told each rank's part of the samples."""


class Speeds:
    """Measures how many samples each rank trains on per second, from which all ranks compute the same division of a
    step: once STEPS steps are measured, and at the beginning of later passes.

    Time in which a rank waits for others does not count. A step has the same total number of samples as with equal
    parts, and each sample has the same weight in the average as in a single process.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ranks = runtime.ranks
        self._is_wanted = runtime.ranks.config.batch == "speed"
        self._speeds: tuple[float, ...] = ()  # samples per second of each rank; empty until measured
        self._fractions: Fractions = ()
        # The step of the current pass from which a new division applies, and that division (empty if there is none).
        self._later: tuple[int, Fractions] = (0, ())
        self._divided = 0  # number of steps of the current pass that were divided so far
        self._steps = -FIRST  # steps measured since the last division; equal on all ranks
        self._seconds: deque[float] = deque(maxlen=RECENT)  # seconds per sample in each of the newest steps
        self._last: tuple[int, float] | None = None  # the current step's samples, and when it began

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
        """Start a new pass, and divide its samples by the latest speeds. Called on all ranks between the same two
        steps."""
        if self._later[1]:
            self._fractions, self._later = self._later[1], (0, ())
        self._divided = 0
        self._last = None
        if self._is_wanted and self._speeds and self._steps >= STEPS:
            self._measure()
            self._fractions, self._later = self._later[1] or self._fractions, (0, ())

    def drew(self, piece: StepShare) -> None:
        """Measure the seconds per sample of the step that ends when the script gets the next step's batch."""
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
        """Send this rank's speed to the other ranks, wait for theirs, and compute the new division if a speed has
        changed."""
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
    """Return a text for the user that says which part of each step's samples each rank gets."""
    if len(fractions) <= LISTED:
        parts = ", ".join(f"{100 * each:.1f} %" for each in fractions)
        return f"of each step's samples ranks get {parts}, by what they train on in a second"
    least, most = (choose(range(len(fractions)), key=fractions.__getitem__) for choose in (min, max))
    return (
        f"of each step's samples ranks get from {100 * fractions[least]:.2f} % (rank {least}) to"
        f" {100 * fractions[most]:.2f} % (rank {most}), by what they train on in a second"
    )
