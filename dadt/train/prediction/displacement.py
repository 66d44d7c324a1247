"""Predicts weights from how far the last steps have moved them, which needs no knowledge of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from dadt import _core
from dadt.train.prediction.base import Holds, Prediction, tensors_of
from dadt.train.prediction.rows import grouped


class Displacement(Prediction):
    """Runs forward and backward at w + factor * (last displacement) + older * (the displacement before it), where w are
    the true weights.

    The buffer of each parameter contains the weights before a step, then the displacement; if `older` is not 0, a
    second buffer contains the previous displacement. (SpecTrain, arXiv:1809.02839, uses the momentum.)
    """

    def __init__(self, parameters: Sequence[torch.Tensor], factors: Callable[[], tuple[float, float]]) -> None:
        """factors: function that returns `factor` and `older` of the formula in the class's docstring. It is called at
        each prediction, as a schedule such as OneCycleLR may change the momentum from which they are computed."""
        super().__init__(parameters)
        self._factors = factors
        self.factor, self.older = factors()
        self.needs = 2 if self.older else int(bool(self.factor))
        self._older: list[torch.Tensor] = []
        """The displacement before the last one, by parameter; zeros if it is not known."""

    def _go_ahead(self) -> bool:
        factor, older = self._factors()
        # New factors are adopted only if `older` stays zero or stays nonzero, because the buffers that exist depend on
        # this.
        if bool(older) == bool(self.older):
            self.factor, self.older = factor, older
        factor = self.factor
        if self.older:
            # The sum is written over the older displacement; in the next step, the last displacement is the older one.
            torch._foreach_mul_(self._older, self.older)
            torch._foreach_add_(self._older, self._buffers, alpha=self.factor)
            self._buffers, self._older, factor = self._older, self._buffers, 1.0
        groups, others = grouped(self._pairs)
        for dtype, counts, (parameters, buffers) in groups:
            _core.predict(dtype, counts, parameters, buffers, factor)
        if others:
            moved = [b for _, b in others]
            torch._foreach_mul_(moved, factor)
            torch._foreach_add_(moved, [p for p, _ in others])
        return True

    def before_step(self, *, late: bool, scale: torch.Tensor | None, delivery: Set[int] = frozenset()) -> None:
        super().before_step(late=late, scale=scale, delivery=delivery)
        if not self.wanted:
            return
        if not self._buffers:
            self._buffers = [torch.empty_like(p.data) for p in self.parameters]
            self._older = [torch.zeros_like(p.data) for p in self.parameters] if self.older else []
        elif self.older and self._holds is Holds.KNOWN:
            self._buffers, self._older = self._older, self._buffers
        torch._foreach_copy_(self._buffers, [p.data for p in self.parameters])
        self._holds = Holds.BEFORE

    def after_step(self, *, held: bool, scale: torch.Tensor | None) -> None:
        """Replace each buffer's content, the weights before the step, by the displacement of the weights."""
        if not self.wanted or self._holds is not Holds.BEFORE:
            return
        groups, others = grouped(self._pairs)
        for dtype, counts, (parameters, buffers) in groups:
            _core.predict(dtype, counts, parameters, buffers, -1.0)
        if others:
            moved = [b for _, b in others]
            torch._foreach_neg_(moved)
            torch._foreach_add_(moved, [p for p, _ in others])
        self._holds = Holds.KNOWN

    @property
    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((p.data, b) for p, b in zip(self.parameters, self._buffers, strict=True))

    def _keep(self, parameters: Sequence[torch.Tensor]) -> None:
        super()._keep(parameters)
        if self._older:
            self._older = self._kept(self._older, parameters)

    def state(self) -> dict[str, Any]:
        known = self._holds is Holds.KNOWN
        # If a forward has run since the last step, the newest displacement is already part of the predicted weights, so
        # that only the older displacement is saved.
        return {
            "displacement": dict(zip(self.owners, self._buffers, strict=True)) if known else {},
            "older": dict(zip(self.owners, self._older, strict=True)) if self._older else {},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.forget()
        displacement, older = state.get("displacement", {}), state.get("older", {})
        if (displacement or older) and self.wanted:
            self._buffers = tensors_of(self.owners, displacement)
            self._older = tensors_of(self.owners, older) if self.older else []
            self._holds = Holds.KNOWN if displacement else Holds.NOTHING

    def forget(self) -> None:
        super().forget()
        if self._older:
            torch._foreach_zero_(self._older)

    def end(self) -> None:
        super().end()
        self._older = []


def momentum_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Return the largest momentum or first beta of the optimizer's groups, and whether it is Nesterov momentum."""
    found = (0.0, False)
    for group in optimizer.param_groups:
        betas = group.get("betas") or (0.0,)
        momentum = float(group.get("momentum") or betas[0])
        found = max(found, (momentum, bool(group.get("nesterov") or "momentum_decay" in group)))
    return found


def auto_factors(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Return the factors of the last displacement d(t) and of the one before, which decide how far ahead to predict.

    With momentum or first beta m: 2m and -m, that is m times the extrapolation 2 d(t) - d(t-1). If gradients are one
    step late, momentum narrows the stable range of learning rates from 2(1+m) to 1-m; with this prediction it is at
    least 0.5 for every m (docs/algorithms.md). Nesterov's step looks ahead by itself, so its factor is 1. Without
    momentum, prediction worsens training, so the factors are 0.
    """
    return factors_by(*momentum_of(optimizer))


def factors_by(momentum: float, nesterov: bool) -> tuple[float, float]:
    """Return the factors of the last displacement and of the one before, for this momentum or first beta. nesterov:
    whether it is Nesterov momentum."""
    if not momentum:
        return 0.0, 0.0
    return (1.0, 0.0) if nesterov else (2 * momentum, -momentum)
