"""Keeps one optimizer equal to its counterparts on other ranks: copies the first rank's state at the start, and
averages the gradients of each step. Both are repeated if ranks are lost."""

from __future__ import annotations

from collections.abc import Callable

from dadt.errors import CommError
from dadt.train.algorithm import Attached
from dadt.train.exchange.exchange import Exchange
from dadt.train.ranks import Ranks


class Lockstep:
    """State of one optimizer relative to its counterparts on other ranks: whether it has the first rank's state, and
    for how many of its steps gradients are averaged."""

    def __init__(self, attachment: Attached, ranks: Ranks) -> None:
        self._attachment = attachment
        self._ranks = ranks
        self.averaged = -1
        """Number of steps whose gradients have been averaged; -1 before the optimizer has the first rank's state."""
        self._averaging = False
        self._undone = False
        """Whether the current step was undone because ranks were lost, and so can begin again, even if more ranks are
        lost."""

    def join(self, take: Callable[[], None]) -> None:
        """Set the optimizer to the first rank's state by calling `take`, and call it again if ranks are lost. Raises
        CommError."""
        with self._ranks.as_a_whole():
            while self.averaged < 0:
                try:
                    take()
                    self.averaged = 0
                except CommError as error:
                    self._ranks.regroup(error)  # `regroup` also updates `averaged` if other ranks are further

    def average(self) -> None:
        """Average one step's gradients over the ranks, and repeat this if ranks are lost. Raises CommError."""
        if not self._attachment.algorithm.averages:
            self._attachment.algorithm.before_step()
            return
        before, self._averaging = self.averaged, True
        with self._ranks.as_a_whole():
            while self.averaged == before:
                try:
                    self._undone = False
                    self._attachment.algorithm.before_step()
                    self.averaged += 1
                except CommError as error:
                    self._ranks.regroup(error)  # `regroup` also updates `averaged` if other ranks are further
        self._averaging = False

    @property
    def stuck(self) -> bool:
        """Whether the optimizer is inside a step, past the point from which the step could begin again."""
        return self._averaging and not self._undone and self._attachment.algorithm.launched is None

    def regroup(self, averaged: int, keep: bool) -> Exchange | None:
        """Prepare the current step to begin again after ranks were lost. averaged: number of steps that the furthest
        rank has averaged. keep: whether exchanges of earlier steps can be launched again on all ranks. Returns the
        exchange to launch again, or None."""
        algorithm, behind = self._attachment.algorithm, self.averaged < averaged
        if self.averaged < 0:
            self.averaged = averaged
            return None
        if self._averaging:  # a rank that averages no step is not yet in the other ranks' current step
            self.averaged = averaged
        self._undone = True
        self._attachment.forget_launched(None if behind else algorithm.launched)
        return algorithm.regroup(behind, keep)
