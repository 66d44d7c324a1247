"""Momentum that was exchanged for parameters without a gradient on any rank, such as a head, an expert or a layer that
a step leaves out. The optimizer skips these parameters, so that nobody applies what was sent of them, though the
compression's error feedback takes it as applied. What it then owes would grow with one or two bits a value, so that
these parameters' momentum is sent in four bits from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dadt.train.moment import Moment, forget_others

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Sent(NamedTuple):
    """What an exchange of momentum counted on, and what its averages are still owed. Equal on all ranks."""

    missed: frozenset[torch.Tensor]
    """Parameters without an average in the exchange before this one, although ranks that do not wait for it have sent
    their next momentum as if the optimizer had stepped with one."""
    owed: dict[torch.Tensor, torch.Tensor]
    """What to add to a parameter's mean momentum, because exchanges before have left it out."""

    def excess(
        self, parameter: torch.Tensor, mean: torch.Tensor, moment: Moment, momentum: torch.Tensor | None
    ) -> torch.Tensor:
        """Subtract from the mean, in place, what it would be without gradients, and return it. momentum: that of the
        optimizer now."""
        old = moment.old * moment.sign
        if parameter in self.missed:
            mean.sub_(parameter, alpha=old * moment.new * moment.decay)
            old *= moment.old
        return mean if momentum is None else mean.sub_(momentum, alpha=old)


class IdleMomentum:
    """What exchanges have left out of idle parameters. Equal on all ranks."""

    def __init__(self) -> None:
        self._owed: dict[torch.Tensor, torch.Tensor] = {}
        self._missed: frozenset[torch.Tensor] = frozenset()
        self.seldom: set[torch.Tensor] = set()
        """Parameters that have been idle in any step."""

    def waited(self) -> None:
        """Note that the next exchange is sent after all those before it have arrived."""
        self._missed = frozenset()

    def arrived(self, there: Pairs) -> Sent:
        """Return what an exchange that has arrived counted on. there: parameters with their means, if any rank had a
        gradient; for all others `owe` is to be called. A rank that saves may call it earlier than the others."""
        owed = {p: self._owed.pop(p) for p, _ in there if p in self._owed} if self._owed else {}
        return Sent(self._missed, owed)

    def delivered(self, parameters: Sequence[torch.Tensor], averages: Pairs) -> None:
        """Note for which of an exchange's parameters there is an average. All ranks call this in the same step."""
        there = {id(p) for p, _ in averages}
        self._missed = frozenset(p for p in parameters if id(p) not in there)
        self.seldom |= self._missed

    def owe(self, parameter: torch.Tensor, excess: torch.Tensor) -> None:
        """Note by how much the mean of an idle parameter exceeds what it would be without gradients."""
        excess = excess.nan_to_num(0.0, 0.0, 0.0)
        self._owed[parameter] = excess + self._owed[parameter] if parameter in self._owed else excess

    def follow(self, numbers: Mapping[torch.Tensor, int]) -> None:
        """Forget parameters that are not in `numbers`."""
        forget_others(self._owed, numbers)
        self.seldom.intersection_update(numbers)
        self._missed = self._missed.intersection(numbers)

    def join(self) -> None:
        """Forget what is owed, as residuals are forgotten, too."""
        self._owed = {}

    def state(self, numbers: Mapping[torch.Tensor, int]) -> list[int]:
        """Return the numbers of the parameters that have been idle, for a checkpoint. Of which ones the exchange under
        way has no average follows once it is delivered."""
        return [numbers[p] for p in self.seldom if p in numbers]

    def load_state(self, state: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        self.seldom = {parameters[i] for i in state}

    def observe(self, parameters: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return what is owed by the parameter's number, for a snapshot, once the exchange under way has arrived."""
        return {i: self._owed[p] for i, p in enumerate(parameters) if p in self._owed}

    def restore(self, own: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Continue bit for bit from a snapshot. own: what `observe` returned."""
        self._owed = {parameters[i]: t.to(parameters[i].device) for i, t in own.items()}
