"""Weight prediction: the forward runs where the weights will be when its gradient arrives."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dadt import _core
from dadt.bucket import DTYPES


class _Holds(enum.Enum):
    """What the extra buffer of each parameter holds."""

    NOTHING = 0
    TRUE_WEIGHTS = 1
    """The parameters are predicted."""
    BEFORE = 2
    """The weights before the step that is about to be taken."""
    DISPLACEMENT = 3


class Prediction:
    """Runs forward and backward at w + factor * (last displacement) + older * (the one before), and gives the script
    true weights else.

    One buffer per parameter serves in turn as true weights, weights before the step, and displacement; where `older`
    is not 0, another one holds the displacement before. Writes go past autograd's version counter: the bits the
    backward needs are the ones it saw.
    (SpecTrain, arXiv:1809.02839, uses the momentum; displacements need no knowledge of the optimizer.)
    """

    def __init__(self, parameters: Sequence[torch.Tensor], factor: float, older: float = 0.0) -> None:
        self.parameters = list(parameters)
        self.factor = factor
        self.older = older
        self._holds = _Holds.NOTHING
        self._buffers: list[torch.Tensor] = []
        self._older: list[torch.Tensor] = []
        """The displacement before the last one; zeros where it is not known."""
        self._predicted: list[torch.Tensor] = []

    @property
    def wanted(self) -> bool:
        """Whether there is anything to predict with."""
        return bool(self.factor or self.older)

    @property
    def applied(self) -> bool:
        return self._holds is _Holds.TRUE_WEIGHTS

    def apply(self) -> None:
        """From true to predicted weights, at the first forward with gradients after a step."""
        if self._holds is not _Holds.DISPLACEMENT:
            return
        factor = self.factor
        if self.older:
            # The sum takes the place of the older one, whose part the last one has from the next step on.
            torch._foreach_mul_(self._older, self.older)
            torch._foreach_add_(self._older, self._buffers, alpha=self.factor)
            self._buffers, self._older, factor = self._older, self._buffers, 1.0
        for dtype, counts, parameters, buffers in _grouped(self.parameters, self._buffers):
            _core.predict(dtype, counts, parameters, buffers, factor)
        for p, b in _others(self.parameters, self._buffers):
            true = p.clone()
            p.add_(b, alpha=factor)
            b.copy_(true)
        self._holds = _Holds.TRUE_WEIGHTS

    def undo(self) -> None:
        """Back to the true weights, bit for bit. They stay in the buffer as the weights before the next step."""
        if self._holds is not _Holds.TRUE_WEIGHTS:
            return
        torch._foreach_copy_([p.data for p in self.parameters], self._buffers)
        self._holds = _Holds.BEFORE

    def suspend(self) -> None:
        """Like `undo`, but `resume` can follow: a forward without gradients in the middle of a step."""
        if self.applied:
            self._predicted = [p.detach().clone() for p in self.parameters]
            self.undo()

    def resume(self) -> None:
        """Back to the predicted weights that a backward is still to use."""
        if self._predicted:
            torch._foreach_copy_([p.data for p in self.parameters], self._predicted)
            self._predicted = []
            self._holds = _Holds.TRUE_WEIGHTS

    def before_step(self) -> None:
        """Make the weights true; they are about to change: remember them."""
        just_undone = self.applied
        self.undo()
        self._predicted = []
        if just_undone or not self.wanted:
            return
        if not self._buffers:
            self._buffers = [torch.empty_like(p.data) for p in self.parameters]
            self._older = [torch.zeros_like(p.data) for p in self.parameters] if self.older else []
        elif self.older and self._holds is _Holds.DISPLACEMENT:
            self._buffers, self._older = self._older, self._buffers
        torch._foreach_copy_(self._buffers, [p.data for p in self.parameters])
        self._holds = _Holds.BEFORE

    def after_step(self) -> None:
        """The optimizer has stepped: the buffer becomes how far the weights moved."""
        if not self.wanted or self._holds is not _Holds.BEFORE:
            return
        for dtype, counts, parameters, buffers in _grouped(self.parameters, self._buffers):
            _core.displace(dtype, counts, parameters, buffers)
        for p, b in _others(self.parameters, self._buffers):
            b.neg_().add_(p)
        self._holds = _Holds.DISPLACEMENT

    def release(self, ids: set[int]) -> None:
        """Another optimizer steps these parameters: it predicts them from now on."""
        if any(id(p) in ids for p in self.parameters):
            self.follow([p for p in self.parameters if id(p) not in ids])

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """The script froze, added or replaced parameters: those that stay keep what is known of them."""
        self.undo()
        self._predicted = []
        if self._buffers:
            known = {id(p): b for p, b in zip(self.parameters, self._buffers, strict=True)}
            fresh = torch.clone if self._holds is _Holds.BEFORE else torch.zeros_like
            self._buffers = [b if (b := known.get(id(p))) is not None else fresh(p.data) for p in parameters]
        if self._older:
            known = {id(p): b for p, b in zip(self.parameters, self._older, strict=True)}
            self._older = [b if (b := known.get(id(p))) is not None else torch.zeros_like(p.data) for p in parameters]
        self.parameters = list(parameters)

    def displacement(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and how far their last step moved them; none where that is not known (any more)."""
        known = self._holds is _Holds.DISPLACEMENT
        return list(zip(self.parameters, self._buffers, strict=True)) if known else []

    def older_displacement(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The same of the step before."""
        # Also where a forward between step and checkpoint has used the last one up: it is the one before by then.
        known = self._holds in (_Holds.DISPLACEMENT, _Holds.BEFORE) and self.older
        return list(zip(self.parameters, self._older, strict=True)) if known else []

    def restore(
        self, displacement: Mapping[torch.Tensor, torch.Tensor], older: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Go on from what `displacement` and `older_displacement` gave."""
        self.forget()
        if (displacement or older) and self.wanted:
            self._buffers = [_known(p, displacement) for p in self.parameters]
            self._older = [_known(p, older) for p in self.parameters] if self.older else []
            self._holds = _Holds.DISPLACEMENT if displacement else _Holds.NOTHING

    def forget(self) -> None:
        """The step was skipped, or the script replaced the weights: the last displacements predict nothing."""
        self.undo()
        self._predicted = []
        if self._older:
            torch._foreach_zero_(self._older)
        self._holds = _Holds.NOTHING

    def end(self) -> None:
        """Nothing is predicted any more: the memory is given back."""
        self.forget()
        self._buffers, self._older = [], []


def _known(p: torch.Tensor, values: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    fresh = torch.zeros_like(p.data)
    return fresh.copy_(values[p]) if p in values else fresh


def momentum_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """The largest momentum or first beta of its groups, and whether it is Nesterov's."""
    found = (0.0, False)
    for group in optimizer.param_groups:
        momentum = float(group.get("momentum") or _first_beta(group))
        found = max(found, (momentum, bool(group.get("nesterov") or "momentum_decay" in group)))
    return found


def auto_factors(optimizer: torch.optim.Optimizer, delay: int = 1) -> tuple[float, float]:
    """How far ahead to predict: factors of the last displacement d(t) and of the one before.

    With momentum or first beta m: 2m and -m, that is m times the displacement that the last two lead to,
    2 d(t) - d(t-1). Momentum narrows the stable learning rate from 2(1+m) to 1-m at delay 1; so predicted it is at
    least 0.5 for every m (dadt/stability.py). Nesterov's step looks ahead by itself: 1. At longer delays one
    displacement serves better: delay + 1, or delay with Nesterov. Without memory of direction prediction does harm: 0.
    """
    momentum, nesterov = momentum_of(optimizer)
    if not momentum:
        return 0.0, 0.0
    if delay > 1 or nesterov:
        return float(delay if nesterov else delay + 1), 0.0
    return 2 * momentum, -momentum


def _first_beta(group: dict[str, Any]) -> float:
    betas = group.get("betas")
    return float(betas[0]) if betas else 0.0


def _grouped(
    parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> list[tuple[_core.DType, list[int], list[int], list[int]]]:
    """Addresses of what the core's one-pass kernels take, by dtype."""
    groups: dict[torch.dtype, tuple[list[int], list[int], list[int]]] = {}
    for p, b in zip(parameters, buffers, strict=True):
        if _in_core(p, b):
            counts, left, right = groups.setdefault(p.dtype, ([], [], []))
            counts.append(p.numel())
            left.append(p.data_ptr())
            right.append(b.data_ptr())
    return [(DTYPES[d], *lists) for d, lists in groups.items()]


def _others(
    parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(p.data, b) for p, b in zip(parameters, buffers, strict=True) if not _in_core(p, b)]


def _in_core(p: torch.Tensor, b: torch.Tensor) -> bool:
    """Both on the CPU, without holes (as every empty_like is) and in the same memory order."""
    return p.device.type == "cpu" and p.dtype.is_floating_point and p.dtype in DTYPES and p.stride() == b.stride()
