"""How far one optimizer is among its peers: it joins them, and averages step by step, again where ranks are lost."""

from __future__ import annotations

from collections.abc import Callable

from dadt.errors import CommError
from dadt.train.algorithm import Attached
from dadt.train.exchange.exchange import Exchange
from dadt.train.ranks import Ranks


class Lockstep:
    """How far one optimizer of this rank is: whether it has joined its peers, and which steps are averaged."""

    def __init__(self, attachment: Attached, ranks: Ranks) -> None:
        self._attachment = attachment
        self._ranks = ranks
        self.averaged = -1
        """Steps whose gradients have been averaged; -1: it has not joined its peers yet."""
        self._averaging = False
        self._undone = False
        """What the step had begun was undone, as ranks were lost: it begins again, however many more are lost."""

    def join(self, take: Callable[[], None]) -> None:
        """Train from the state of the first rank, by `take`. Raises CommError."""
        with self._ranks.as_a_whole():
            while self.averaged < 0:
                try:
                    take()
                    self.averaged = 0
                except CommError as error:
                    self._ranks.regroup(error)  # where others have joined already, so has this one then

    def average(self) -> None:
        """Average one step's gradients. Raises CommError."""
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
                    self._ranks.regroup(error)  # where others have them already, so has this one then
        self._averaging = False

    @property
    def stuck(self) -> bool:
        """Whether it is in a step, past the point from which the step could begin again."""
        return self._averaging and not self._undone and self._attachment.algorithm.launched is None

    def regroup(self, averaged: int, keep: bool) -> Exchange | None:
        """Ranks were lost. averaged: steps that the furthest rank has averaged. keep: as in Algorithm.regroup. Returns
        the exchange that is to be launched once more; None: there is none."""
        algorithm, behind = self._attachment.algorithm, self.averaged < averaged
        if self.averaged < 0:
            self.averaged = averaged
            return None
        if self._averaging:  # else it has not come to the step yet in which the others are
            self.averaged = averaged
        self._undone = True
        self._attachment.forget_launched(None if behind else algorithm.launched)
        return algorithm.regroup(behind, keep)
