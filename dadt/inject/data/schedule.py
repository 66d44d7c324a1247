"""Learning rate schedules that end too late, as a pass has fewer steps than alone."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler


class Schedules:
    """Schedulers whose length cannot come from len(loader), which nobody had asked for when they were made."""

    def __init__(self) -> None:
        self.length_asked = False
        self._steps: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
        """Scheduler to its step at the beginning of the pass."""

    def begin(self) -> None:
        """A pass of training begins."""
        for scheduler in self._steps:
            self._steps[scheduler] = scheduler.last_epoch

    def by_step(self) -> bool:
        """Whether one of them has made more than one step since."""
        return any(scheduler.last_epoch > begun + 1 for scheduler, begun in self._steps.items())

    def install(self) -> None:
        """Notice schedulers that are made from here on."""
        original = LRScheduler.__init__

        @functools.wraps(original)
        def __init__(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            if not self.length_asked:
                self._steps[scheduler] = scheduler.last_epoch

        setattr(LRScheduler, "__init__", __init__)  # noqa: B010 (mypy minds else)
