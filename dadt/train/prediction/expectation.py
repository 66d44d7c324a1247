"""Prediction by the optimizer's own next step, with what the rank knows of the gradient that it will be given."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.train.prediction.base import Holds, Prediction, Tensors, grouped, in_core, tensors_of
from dadt.train.prediction.next_step import Factors, Step, next_steps

Term = tuple[Sequence[torch.Tensor | None], torch.Tensor | float]
"""Tensors, by parameter, and their weight."""
DAMPING = 0.5
"""Of that share, of how far the rank's gradient before was off the average: it damps what ranks differ by."""


def share_of(ranks: int) -> float:
    """Of the rank's own gradient in what it expects: the less, the more ranks there are, down to half.

    From the mean it differs by sqrt(ranks - 1) times the noise of that; see docs/results/convergence.md.
    """
    return max(0.5, 0.9 / math.sqrt(max(1, ranks - 1)))


class Expectation(Prediction):
    """Runs forward and backward where the optimizer would put the weights if it were given, at step t,
    share * own(t) + (1 - share) * average(t-1) + DAMPING * share * (own(t-1) - average(t-1)),
    with the rank's own gradient in flight and the last average that has arrived.

    The mean over ranks of where they predict to is then near the true next point: the mean of their own gradients is
    the average in flight. The last term has the mean 0. Without it what a rank is off by comes back in its next
    gradient, turned round, and grows where rate * curvature * share is above 1; with it, where that is above 2
    (docs/algorithms.md). One buffer of each parameter holds the rank's own gradient, then what is expected,
    then the true weights, another the own gradient before. (Prediction by the optimizer's step with old gradients:
    XPipe, arXiv:1911.04610. That a rank knows its own part of those in flight is added here.)
    """

    needs = 1
    sees_gradients = True

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], share: float) -> None:
        super().__init__(parameters)
        self.share = share
        self._optimizer = weakref.ref(optimizer)
        self._norm: torch.Tensor | None = None
        self._came: list[tuple[torch.Tensor | None, int]] = []
        """The averages as they have come, and their versions."""
        self._clip: torch.Tensor | float = 1.0
        """The share of the last averages' norm that the script has left."""
        self._previous: list[torch.Tensor] = []
        """The rank's own gradients that are on their way; after the step, what the next average is made of."""
        self._previous_scale: torch.Tensor | float | None = None
        """Their loss scale; None where they are not known."""
        self._absent: set[int] = set()
        """Parameters (by id) of which nothing is expected: the optimizer is to leave them out."""

    def before_step(self, *, late: bool, scale: torch.Tensor | None) -> None:
        super().before_step(late=late, scale=scale)
        if not self._buffers:
            self._buffers = [torch.zeros_like(p.data) for p in self.parameters]
        if late:
            # A copy: where gradients are set to zero in place, they lie in memory that averages come to.
            self._absent = self._copy_gradients(self._buffers)
            self._holds = Holds.OWN
        elif self._holds is Holds.AVERAGE:  # the first late step: nothing arrives in it
            self._expect_first(scale)

    def _expect_first(self, scale: torch.Tensor | None) -> None:
        """Begin with the average of the last synchronous step, in the buffers, and the own gradients in `.grad`."""
        self._previous = [torch.zeros_like(p.data) for p in self.parameters]
        self._absent &= self._copy_gradients(self._previous)
        self._previous_scale = 1.0 if scale is None else scale
        own = self.share * self._clip / self._previous_scale
        self._sum(self._buffers, (self._buffers, 1 - self.share), (self._previous, own))
        self._holds = Holds.KNOWN if _finite(self._buffers) else Holds.NOTHING

    def arrived(self, norm: torch.Tensor | None) -> None:
        self._norm = norm
        self._came = [(p.grad, 0 if p.grad is None else p.grad._version) for p in self.parameters]

    def after_step(self, *, held: bool, scale: torch.Tensor | None) -> None:
        if held and self._holds is Holds.OWN:
            self.forget()  # what has come was of other parameters
        if held or not self._buffers:
            return
        changed = self._changed()
        self._clip = self._clipped() if changed else 1.0
        if self._holds is not Holds.OWN:
            self._absent = self._copy_gradients(self._buffers)
            self._holds = Holds.AVERAGE
            return
        self._expect(1.0 if scale is None else scale)
        if (changed or scale is not None) and not _finite(self._buffers):
            # A gradient scaler will leave the rank's own out, or a script that looks at norms; or a fused optimizer
            # has just left the averages out, by itself.
            self.forget()

    def _expect(self, scale: torch.Tensor | float) -> None:
        """Go on with the own gradients in the buffers, of this loss scale, those before, and averages in `.grad`."""
        gradients = self._gradients()
        average, terms = 1 - self.share, [(self._buffers, self.share * self._clip / scale)]
        if self._previous_scale is not None:
            before = DAMPING * self.share
            average -= before
            terms.insert(0, (self._previous, before * self._clip / self._previous_scale))
        elif not self._previous:
            self._previous = [torch.empty_like(b) for b in self._buffers]
        self._sum(self._previous, *terms, (gradients, average))
        self._absent -= {id(p) for p, g in zip(self.parameters, gradients, strict=True) if g is not None}
        self._buffers, self._previous = self._previous, self._buffers
        self._previous_scale = scale
        self._holds = Holds.KNOWN

    def _gradients(self) -> list[torch.Tensor | None]:
        gradients = (p.grad for p in self.parameters)
        return [g.to_dense() if g is not None and g.layout != torch.strided else g for g in gradients]

    def _copy_gradients(self, buffers: list[torch.Tensor]) -> set[int]:
        """The parameters that have none; their buffers are zeros."""
        absent = set()
        for p, b, g in zip(self.parameters, buffers, self._gradients(), strict=True):
            if g is None:
                b.zero_()
                absent.add(id(p))
            else:
                b.copy_(g)
        return absent

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

    def _sum(self, into: list[torch.Tensor], *terms: Term) -> None:
        """into = sum of weight * tensor, of the tensors that are there; `into` may be the first of them."""
        columns, weights = zip(*terms, strict=True)
        for row in zip(into, *columns, strict=True):
            b, parts = row[0], [part for part in zip(row[1:], weights, strict=True) if part[0] is not None]
            if in_core(row):
                sources, factors = [t.data_ptr() for t, _ in parts], [float(weight) for _, weight in parts]
                _core.reduce(DTYPES[b.dtype], _core.Reduction.sum, b.data_ptr(), sources, factors, 1.0, b.numel())
            else:
                (first, weight), *others = parts
                torch.mul(first, weight, out=b)
                for t, weight in others:
                    b.add_(t * weight)

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
            self._previous_scale = None
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

    def _keep(self, parameters: Sequence[torch.Tensor]) -> None:
        super()._keep(parameters)
        if self._previous:
            self._previous = self._kept(self._previous, parameters)
        if not self._previous:
            self._previous_scale = None

    def forget(self) -> None:
        super().forget()
        self._previous_scale = None

    def end(self) -> None:
        super().end()
        self._previous = []


def _foresee(factors: Factors, steps: Sequence[Step]) -> None:
    """Put the next weights into the parameters, and the present ones into the buffers."""
    groups, others = grouped(steps)
    for dtype, counts, (parameters, expected, momenta, squares) in groups:
        _core.foresee(dtype, counts, parameters, expected, momenta, squares, _core.NextStep(**factors))
    for step in others:
        true = step.parameter.detach().clone()
        step.parameter.data.copy_(step.ahead(factors))
        step.expected.copy_(true)


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm(list(tensors))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float64) for n in norms]))
    return norm


def _finite(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(torch.isfinite(_norm(tensors)))
