"""Detects learning rate schedules that end too late, because a divided pass has fewer steps than in a single
process."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from dadt.inject.patch import replaces


class Schedules:
    """Learning rate schedulers created before the script called len(loader) for the first time, so that their lengths
    cannot be derived from it."""

    def __init__(self) -> None:
        self.length_asked = False
        self._steps: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
        """Number of steps that each scheduler had made when the current pass began."""

    def begin(self) -> None:
        """Record how many steps each scheduler has made, when a training pass begins."""
        for scheduler in self._steps:
            self._steps[scheduler] = scheduler.last_epoch

    def by_step(self) -> bool:
        """Return whether any of the schedulers has made more than one step since the pass began, so that it counts
        steps, not epochs."""
        return any(scheduler.last_epoch > begun + 1 for scheduler, begun in self._steps.items())

    def install(self) -> None:
        """Patch LRScheduler to record each scheduler that is created from now on."""

        @replaces("__init__", LRScheduler)
        def init(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            init.__wrapped__(scheduler, *args, **kwargs)
            if not self.length_asked:
                self._steps[scheduler] = scheduler.last_epoch
