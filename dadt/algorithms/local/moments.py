"""Adam's moments in `local`: all ranks have the same v, and the momentum follows from the progress of a round.

Without this, each rank would divide by the v of its own gradients, which is larger and noisier than that of their mean,
and drift off by its own momentum. So v is shared (`Momentum.share`), and after a round of progress p(i) from the anchor
a, momentum becomes what would have led to the ranks' mean progress P, which arrives D steps later. No messages are
needed for this:

    at the end of a round:   m(i) = -k (p(i) + decay a sum(lr))
    D steps later:           m(i) = m(i) - beta1^D k (P - p(i))
    where                    k = (sqrt(v) + eps) (1 - beta1^t) / sum(lr)

Sums are over the round, and v has no bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dadt.algorithms.local.outer import Fragment, OuterRow
from dadt.comm import plain
from dadt.errors import CommError
from dadt.train.attachment import Attachment
from dadt.train.moment import is_adam, moments_of, rates_of, wide
from dadt.train.own_moments import REFRESH
from dadt.train.restored import numbers_of

SHARED = "v"
"""Name of what ranks compare after a loss to learn which of them have shared v."""


class RoundMoments:
    """Updates the moments of one optimizer whose ranks train alone. Does nothing for parameters whose v is not
    shared."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._steps = 0
        """Number of steps that this rank has taken alone."""
        self._shared = -1
        """Value of `_steps` when v was last shared; -1 before the first time."""
        self._rates: list[float] = []
        """For each param_group, the sum of the learning rates of all steps that this rank has taken alone."""
        self._begun: dict[str, list[float]] = {}
        """Value of `_rates` when the current round of each fragment began, by the fragment's name."""
        self._begun_at: dict[str, int] = {}
        """Value of `_steps` when the current round of each fragment began."""
        self._sent: dict[str, tuple[int, int, list[float]]] = {}
        """For each fragment whose progress is under way, by name: the value of `_steps` at the beginning and at the end
        of that round, and the round's sums of learning rates."""
        self._idle = WeakTensorKeyDictionary()
        """For each parameter, the value of `_steps` after the last step in which it had no gradient."""

    def begin(self, fragment: Fragment) -> None:
        """Begin a round of the fragment: note the sums of learning rates so far."""
        self._begun[fragment.name] = list(self._rates)
        self._begun_at[fragment.name] = self._steps

    def stepped(self) -> None:
        """Count a step that this rank has taken alone, and add up its learning rates."""
        self._steps += 1
        # Learning rates count only if the optimizer has made the step, which the script may have skipped.
        if self._attachment.stepping and is_adam(self._attachment.optimizer):
            rates = rates_of(self._attachment.optimizer)
            self._rates = [sum(each) for each in zip_longest(self._rates, rates, fillvalue=0.0)]
            for p in self._attachment.parameters:
                if p.grad is None:
                    self._idle[p] = self._steps

    def share(self) -> None:
        """Set Adam's v to a value that all ranks compute together, unless that was done less than REFRESH steps ago.
        All ranks call it after the same step. It is repeated if ranks are lost."""
        if self._shared >= 0 and self._steps - self._shared < REFRESH:
            return
        while self._shared < self._steps:
            try:
                self._attachment.momentum.share()
                self._shared = self._steps
            except CommError as error:
                self._attachment.ranks.regroup(error)  # it calls `follow`, which ends this if other ranks have done it

    def rounds(self) -> dict[str, list[int]]:
        """Return after how many steps this rank has shared v, by the name SHARED, for `Algorithm.rounds`."""
        return {SHARED: [self._shared]}

    def follow(self, rounds: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """End a sharing of v that another rank has ended, after ranks were lost, with the other rank's factors. This
        rank's v stays as it is until all ranks share it again. rounds: what `rounds` returned on each rank. Raises
        CommError."""
        shared = [each[SHARED][0] if SHARED in each else None for each in rounds]
        newest = max((steps for steps in shared if steps is not None), default=-1)
        if all(steps in (None, newest) for steps in shared):
            return
        ranks, momentum = self._attachment.ranks, self._attachment.momentum
        root = shared.index(newest)
        given = plain.encode(momentum.state(), SHARED) if root == ranks.group.rank else b""
        state = ranks.tell(f"local, factors of v{self._attachment.name}", given)[root]
        if self._shared < newest:
            momentum.load_state(plain.decode(state))
            self._shared = newest

    def _since(self, name: str) -> list[float]:
        """Return the sums of learning rates of the named fragment's round so far."""
        begun = self._begun.get(name, [])
        return [now - before for now, before in zip_longest(self._rates, begun, fillvalue=0.0)]

    def restart(self, fragment: Fragment) -> None:
        """Replace the momentum by the one that follows from the round's progress. Called at the end of a round, before
        the progress is sent."""
        rates, begun = self._since(fragment.name), self._begun_at.get(fragment.name, 0)
        self._sent[fragment.name] = begun, self._steps, rates
        self.begin(fragment)
        for row, m, scale, decay, _ in self._momenta(fragment.rows.values(), rates, begun):
            progress = row.part.data.to(row.anchor) - row.anchor
            m.copy_(progress.add_(row.anchor, alpha=decay).mul_(scale).neg_())

    def tell(self, fragment: Fragment) -> None:
        """Correct the momentum by the difference between the ranks' mean progress and this rank's own. Called when the
        mean has arrived, before it is merged."""
        begun, ended, rates = self._sent.pop(fragment.name, (0, 0, []))
        found = {id(row.parameter): (own, mean) for row, own, mean in fragment.progress()}
        rows = [row for key, row in fragment.rows.items() if key in found]
        for row, m, scale, _, beta1 in self._momenta(rows, rates, begun):
            own, mean = found[id(row.parameter)]
            m.sub_((mean - own).mul_(scale), alpha=beta1 ** (self._steps - ended))

    def state(self) -> dict[str, Any]:
        """Return the steps, and of each round its learning rates so far and where it began, for a checkpoint."""
        rates = {name: self._since(name) for name in self._begun}
        return {"steps": self._steps, "shared": self._shared, "rates": rates, "begun": dict(self._begun_at)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self._steps, self._shared, self._rates = state["steps"], state["shared"], []
        self._begun = {name: [-rate for rate in since] for name, since in state["rates"].items()}
        self._begun_at, self._idle = dict(state.get("begun", {})), WeakTensorKeyDictionary()

    def observe(self) -> dict[int, int]:
        """Return what this rank alone knows, for a snapshot: by the parameter's number, the value of `_idle`."""
        numbers = numbers_of(self._attachment.optimizer)
        return {number: self._idle[p] for p, number in numbers.items() if p in self._idle}

    def restore(self, own: Mapping[int, int]) -> None:
        """Continue bit for bit from a snapshot. own: what `observe` returned."""
        parameters = list(numbers_of(self._attachment.optimizer))
        for number, steps in own.items():
            self._idle[parameters[number]] = steps

    @torch.no_grad()
    def _momenta(
        self, rows: Iterable[OuterRow], rates: Sequence[float], begun: int
    ) -> Iterator[tuple[OuterRow, torch.Tensor, torch.Tensor, float, float]]:
        """Yield each row whose momentum follows from its progress, with its momentum, the factor k, the factor `decay
        sum(lr)` of the anchor, and beta1. Parameters whose progress does not show their momentum are left out: those
        that had no gradient in one of the round's steps, those of other optimizers, too, and 16-bit ones, whose
        progress is rounded. rates: for each param_group, the sum of the round's learning rates. begun: the value of
        `_steps` when the round began."""
        optimizer, momentum = self._attachment.optimizer, self._attachment.momentum
        if not is_adam(optimizer):
            return
        groups = zip(optimizer.param_groups, moments_of(optimizer), rates, strict=False)
        others = {id(p) for each in self._attachment.siblings if each is not self._attachment for p in each.parameters}
        of = {id(p): (group, moment, rate) for group, (moment, ps), rate in groups for p in ps if rate}
        for row in rows:
            if id(row.parameter) not in of or id(row.parameter) in others or not momentum.shares(row.parameter):
                continue
            idle = row.parameter in self._idle and self._idle[row.parameter] > begun
            if idle or row.parameter.element_size() == 2:
                continue
            group, moment, rate = of[id(row.parameter)]
            state = optimizer.state[row.parameter]
            if "exp_avg" not in state:  # the script has cleared it
                continue
            steps = float(state["step"])
            if not steps:
                continue
            root = (wide(state["exp_avg_sq"]) / (1 - moment.beta2**steps)).sqrt_().add_(float(group["eps"]))
            # Weight decay that is not added to gradients is subtracted from the weights directly.
            decay = (float(group["weight_decay"]) - moment.decay) * rate
            yield row, state["exp_avg"], root.mul_((1 - moment.old**steps) / rate), decay, moment.old
