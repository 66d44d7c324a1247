"""Detects learning rate schedules that end too late, because a divided pass has fewer steps than in a single
process."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from dadt.inject.patch import replaces


class Schedules:
    """Schedulers created before the script ever called len(loader), so that their lengths cannot come from it."""

    def __init__(self) -> None:
        self.length_asked = False
        self._steps: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
        """Step of each scheduler at the beginning of the current pass."""

    def begin(self) -> None:
        """Record the schedulers' steps when a pass of training begins."""
        for scheduler in self._steps:
            self._steps[scheduler] = scheduler.last_epoch

    def by_step(self) -> bool:
        """Whether any of the schedulers has made more than one step since the pass began."""
        return any(scheduler.last_epoch > begun + 1 for scheduler, begun in self._steps.items())

    def install(self) -> None:
        """Patch LRScheduler to record each scheduler that is created from now on."""

        @replaces("__init__", LRScheduler)
        def init(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            init.__wrapped__(scheduler, *args, **kwargs)
            if not self.length_asked:
                self._steps[scheduler] = scheduler.last_epoch
