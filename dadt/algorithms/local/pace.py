"""Chooses how many steps a round of `local` takes, and during how many steps of the next round its exchange may run in
the background."""

from __future__ import annotations

import math

from dadt.algorithms.local.outer import Fragment
from dadt.config.check import round_steps
from dadt.train.attachment import Attachment

WAITED = 0.02
"""If waiting for an exchange takes less than this share of the training time, ranks wait for it instead of training on
without its result."""


class Pace:
    """Chooses the lengths of one optimizer's rounds and exchanges. With `--sync-every auto` a round has only as many
    steps as are needed to hide its exchange."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        config = attachment.ranks.config
        self.every = round_steps(config.sync_every)
        """Number of steps of a round, if it is not chosen by measured times."""
        self._fixed = None if config.overlap_steps == "auto" else int(config.overlap_steps)
        """Number of steps for which each exchange may run in the background; None if it is as many as the previous
        exchange took."""
        self._chosen = False
        """Whether the length of rounds was chosen by `choose`."""
        self._first: int | None = None
        """Number of steps for which the first exchanges may run in the background, equal on all ranks; None if it is
        half a round."""

    @property
    def measured(self) -> bool:
        """Whether rounds take as many steps as hide their exchange, by measured times. On a GPU, times are not
        measured."""
        ranks = self._attachment.ranks
        return not self._chosen and ranks.config.sync_every == "auto" and ranks.device is None

    def choose(self, every: int, *, at_once: bool) -> None:
        """Give all rounds this number of steps; 0 leaves it as it is. at_once: whether exchanges are waited for, unless
        the user has set --overlap-steps."""
        if every:
            self.every, self._chosen = every, True
        if at_once and self._fixed is None:
            self._fixed = 0

    def foresee(self) -> None:
        """Let the first exchanges of new fragments run in the background for as many steps as earlier averages took.
        All ranks call this together."""
        a, measure = self._attachment, self._attachment.measure
        if self._fixed is not None or self.measured or a.ranks.device is not None:
            return
        known = measure.exchange and measure.compute
        mine = overlap_of(measure.exchange, measure.compute, self.every) if known else self.longest
        self._first = max(a.ranks.collect(f"local, the first exchange{a.name}", mine))

    @property
    def longest(self) -> int:
        """Largest number of steps that may run while an exchange is in the background, which is half a round. An
        exchange that took a whole round would leave the ranks' weights without an average for two rounds."""
        return (self.every + 1) // 2 if self._fixed is None else self._fixed

    def begin(self, fragment: Fragment, number: int, steps: int) -> None:
        """Begin the rounds of a new fragment. steps: number of steps that this rank has taken alone."""
        fragment.every = fragment.next_every = 1 if self.measured else self.every
        first = self.longest if self._first is None else self._first
        fragment.overlap = fragment.took = min(1, self.longest) if self.measured else first
        offset = number * fragment.every // self._attachment.ranks.config.fragments
        fragment.since = (steps - offset) % fragment.every

    def resume(self, fragment: Fragment, overlap: int | None) -> None:
        """Continue from a checkpoint. overlap: steps for which the next exchange may run in the background, if
        known."""
        if overlap is not None and self._fixed is None and not self.measured:
            fragment.overlap = fragment.took = overlap

    def exchanged(self, fragment: Fragment) -> None:
        """Choose the lengths of the fragment's next round and exchange that this rank proposes to the other ranks.
        Called when an exchange of the fragment has ended."""
        seconds, step = fragment.seconds, self._attachment.measure.alone
        if self.measured and step:
            fragment.next_every = steps_of(seconds, step)
        if self._fixed is None and self._attachment.ranks.device is None:
            fragment.took = overlap_of(seconds, step, fragment.next_every)


def steps_of(exchange: float, step: float) -> int:
    """Return the smallest number of steps of a round such that half of the round hides an exchange. exchange, step:
    seconds of an exchange and of a step."""
    return max(1, 2 * math.ceil(exchange / step) - 1)


def overlap_of(exchange: float, step: float, every: int) -> int:
    """Return the number of steps, at most half of `every`, during which an exchange is done. Returns 0 if waiting for
    each exchange costs nearly nothing. exchange, step: seconds of an exchange and of a step. every: steps between two
    exchanges."""
    if exchange < WAITED * every * step:
        return 0
    return min((every + 1) // 2, math.ceil(exchange / step)) if step else (every + 1) // 2
