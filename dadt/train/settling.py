"""Decides when the beginning of `--compression momentum:N`, in which ranks send gradients, is over."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Protocol

import torch

from dadt.train.algorithm import Attached
from dadt.train.moment import forget_others, moments_of, rates_of, sizes_of, state_of
from dadt.train.optimizers import Optimizers

_BEGINNING = 0.1
"""Share of a training of known length (by its learning rate scheduler) after which ranks send momentum."""
_SETTLED = 0.5
"""If no scheduler knows the number of steps, ranks send momentum once the logarithm of the tensors' second moments has
changed by less than this on average in two times as many steps as lie between two decisions, and the learning rate does
not rise any more."""


class Sender(Attached, Protocol):
    """Interface of an optimizer that DADT manages, with the members that sending momentum uses."""

    optimizers: Optimizers


class Settling:
    """Whether one optimizer's second moments have settled."""

    def __init__(self, attachment: Sender) -> None:
        self._attachment = attachment
        self.sizes: list[dict[torch.Tensor, float]] = []
        """The sum of each tensor's v at each of the last three decisions whether the beginning ends."""
        self.rates: list[float] = []

    def decide(self) -> bool:
        """Return whether this rank finds that momentum can be sent from now on."""
        optimizer = self._attachment.optimizer
        sizes, rate = sizes_of(optimizer), max(rates_of(optimizer), default=0.0)
        self.sizes = [*self.sizes[-2:], sizes]
        self.rates = [*self.rates[-2:], rate]
        momenta = (state_of(optimizer, p).get(moment.first) for moment, every in moments_of(optimizer) for p in every)
        if all(momentum is None for momentum in momenta):
            return False
        share = self._attachment.optimizers.progress(optimizer)
        if share:
            return share >= _BEGINNING
        if len(self.sizes) < 3 or rate > self.rates[0]:
            return False
        before = self.sizes[0]
        changes = [abs(math.log(s / before[p])) for p, s in sizes.items() if s > 0 and before.get(p, 0.0) > 0]
        return not sizes or (bool(changes) and sum(changes) / len(changes) < _SETTLED)

    def follow(self, parameters: Container[torch.Tensor]) -> None:
        """Forget all other parameters."""
        for sizes in self.sizes:
            forget_others(sizes, parameters)
