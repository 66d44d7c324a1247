"""Momentum that was exchanged for parameters without a gradient on any rank, such as a head, an expert or a layer that
a step leaves out. The optimizer skips these parameters, so that nobody applies what was sent of them, though the
compression's error feedback takes it as applied. What it then owes would grow with one or two bits a value, so that
these parameters' momentum is sent in four bits from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

    def arrived(self, there: Pairs, idle: Pairs) -> Sent:
        """Note that an exchange has arrived. there: parameters with their means, if any rank had a gradient. idle: all
        others; `owe` is to be called for these."""
        owed = {p: self._owed.pop(p) for p, _ in there if p in self._owed}
        sent, self._missed = Sent(self._missed, owed), frozenset(p for p, _ in idle)
        self.seldom |= self._missed
        return sent

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

    def state(self, numbers: Mapping[torch.Tensor, int]) -> dict[str, list[int]]:
        """Return what a checkpoint needs, once the exchange under way has arrived."""
        every = {"missed": self._missed, "seldom": self.seldom}
        return {name: [numbers[p] for p in known if p in numbers] for name, known in every.items()}

    def load_state(self, state: Mapping[str, Sequence[int]], parameters: Sequence[torch.Tensor]) -> None:
        missed, seldom = ([parameters[i] for i in state.get(name, ())] for name in ("missed", "seldom"))
        self._missed, self.seldom = frozenset(missed), set(seldom)

    def observe(self, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return everything, for a snapshot, once the exchange under way has arrived."""
        owed = {i: self._owed[p] for i, p in enumerate(parameters) if p in self._owed}
        return {"owed": owed, **self.state({p: i for i, p in enumerate(parameters)})}

    def restore(self, own: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Continue bit for bit from a snapshot. own: what `observe` returned."""
        self.load_state(own, parameters)
        self._owed = {parameters[i]: t.to(parameters[i].device) for i, t in own["owed"].items()}
