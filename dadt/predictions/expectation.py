"""Prediction by the optimizer's own next step, with what the rank knows of the gradient that it will be given."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dadt import _core
from dadt.bucket import DTYPES
from dadt.predictions.base import Holds, Prediction, Tensors, grouped, in_core, tensors_of
from dadt.predictions.next_step import Factors, Step, next_steps

SHARE = 0.5
"""Of the rank's own gradient in what it expects; see docs/results/convergence.md."""


class Expectation(Prediction):
    """Runs forward and backward where the optimizer would put the weights if it were given
    share * (the rank's own gradient in flight) + (1 - share) * (the last average that has arrived).

    The mean over ranks of where they predict to is then near the true next point: the mean of their own gradients is
    the average in flight. The buffer of each parameter holds the rank's own gradient, then what is expected, then the
    true weights. (Prediction by the optimizer's step with old gradients: XPipe, arXiv:1911.04610. That a rank knows
    its own part of those in flight is added here.)
    """

    needs = 1
    sees_gradients = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], share: float = SHARE
    ) -> None:
        super().__init__(parameters)
        self.share = share
        self._optimizer = weakref.ref(optimizer)
        self._norm: torch.Tensor | None = None
        self._came: list[tuple[torch.Tensor | None, int]] = []
        """The averages as they have come, and their versions."""
        self._clip: torch.Tensor | float = 1.0
        """What the script has left of the last averages' norm."""
        self._absent: set[int] = set()
        """Parameters (by id) of which nothing is expected: the optimizer is to leave them out."""

    def before_step(self, *, late: bool, scale: torch.Tensor | None) -> None:
        super().before_step(late=late, scale=scale)
        if not self._buffers:
            self._buffers = [torch.zeros_like(p.data) for p in self.parameters]
        if self._holds is Holds.AVERAGE:  # the first late step: nothing arrives in it
            own = self.share * self._clip
            self._mix(1 - self.share, own if scale is None else own / scale)
            self._holds = Holds.KNOWN if _finite(self._buffers) else Holds.NOTHING
        elif late:
            # A copy: where gradients are set to zero in place, they lie in memory that averages come to.
            self._copy_gradients()
            self._holds = Holds.OWN

    def arrived(self, norm: torch.Tensor | None) -> None:
        self._norm = norm
        self._came = [(p.grad, 0 if p.grad is None else p.grad._version) for p in self.parameters]

    def after_step(self, *, held: bool, scale: torch.Tensor | None) -> None:
        if held or not self._buffers:
            return
        changed = self._changed()
        self._clip = self._clipped() if changed else 1.0
        if self._holds is not Holds.OWN:
            self._copy_gradients()
            self._holds = Holds.AVERAGE
        elif (changed or scale is not None) and not _finite(self._buffers):
            self.forget()  # a gradient scaler will leave it out, or a script that looks at norms
        else:
            own = self.share * self._clip
            self._mix(own if scale is None else own / scale, 1 - self.share)
            self._holds = Holds.KNOWN

    def _gradients(self) -> list[torch.Tensor | None]:
        gradients = (p.grad for p in self.parameters)
        return [g.to_dense() if g is not None and g.layout != torch.strided else g for g in gradients]

    def _copy_gradients(self) -> None:
        self._absent = set()
        for p, b, g in zip(self.parameters, self._buffers, self._gradients(), strict=True):
            if g is None:
                b.zero_()
                self._absent.add(id(p))
            else:
                b.copy_(g)

    def _changed(self) -> bool:
        """Whether the script has clipped, unscaled or otherwise changed the averages."""
        came, self._came = self._came, []
        if len(came) != len(self.parameters):
            return False
        return any(
            p.grad is not g or (g is not None and g._version != version)
            for p, (g, version) in zip(self.parameters, came, strict=True)
        )

    def _clipped(self) -> torch.Tensor | float:
        left = [g for g in self._gradients() if g is not None]
        if self._norm is None or not left:
            return 1.0
        ratio = _norm(left).to(self._norm.device) / self._norm
        ratio = torch.where(torch.isfinite(ratio), ratio, 1.0)
        return float(ratio) if ratio.device.type == "cpu" else ratio

    def _mix(self, keep: torch.Tensor | float, weight: torch.Tensor | float) -> None:
        """buffer = keep * buffer + weight * gradient."""
        for p, b, g in zip(self.parameters, self._buffers, self._gradients(), strict=True):
            if g is not None:
                self._absent.discard(id(p))
            if g is not None and in_core((b, g)):
                sources, weights = [b.data_ptr(), g.data_ptr()], [float(keep), float(weight)]
                _core.reduce(DTYPES[b.dtype], _core.Reduction.sum, b.data_ptr(), sources, weights, 1.0, b.numel())
            else:
                b.mul_(keep)
                if g is not None:
                    b.add_(g * weight)

    def _go_ahead(self) -> None:
        optimizer = self._optimizer()
        expected = {id(p): b for p, b in zip(self.parameters, self._buffers, strict=True) if id(p) not in self._absent}
        for factors, steps in next_steps(optimizer, expected) if optimizer is not None else ():
            _foresee(factors, steps)
        for p, b in zip(self.parameters, self._buffers, strict=True):
            if id(p) in expected or id(p) in self._absent:  # or the optimizer has not stepped it yet
                b.copy_(p.data)

    def join(self, averages: Tensors, scale: torch.Tensor | None) -> None:
        if averages and self._holds is not Holds.AVERAGE:
            self.undo()
            self._buffers = tensors_of(self.parameters, averages)
            self._absent = {id(p) for p in self.parameters if p not in averages}
            clip = self._clip if scale is None else self._clip / scale
            for b in self._buffers:
                b.mul_(clip)
            self._holds = Holds.KNOWN
            if not _finite(self._buffers):
                self.forget()  # it will be left out when it arrives

    def state(self) -> dict[str, Any]:
        known = self._holds is Holds.AVERAGE
        pairs = zip(self.parameters, self._buffers, strict=True) if known else ()
        average = {p: b for p, b in pairs if id(p) not in self._absent}
        return {"clip": float(self._clip), "average": average}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.forget()
        self._clip = state.get("clip", 1.0)
        if average := state.get("average"):
            self._buffers = tensors_of(self.parameters, average)
            self._absent = {id(p) for p in self.parameters if p not in average}
            self._holds = Holds.AVERAGE


def _foresee(factors: Factors, steps: Sequence[Step]) -> None:
    """Put the next weights into the parameters, and the present ones into the buffers."""
    for dtype, counts, (parameters, expected, momenta, squares) in grouped(steps):
        _core.foresee(dtype, counts, parameters, expected, momenta, squares, _core.NextStep(**factors))
    for step in steps:
        if not in_core(step):
            true = step.parameter.detach().clone()
            step.parameter.data.copy_(step.ahead(factors))
            step.expected.copy_(true)


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm(list(tensors))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float64) for n in norms]))
    return norm


def _finite(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(torch.isfinite(_norm(tensors)))
