"""Predicts weights by the optimizer's own next step, with a gradient that the rank expects from what it knows of the
averaged gradient that will arrive."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter, is_
from typing import Any

import torch

from dadt import _core
from dadt.comm import shards
from dadt.comm.bucket import DTYPES
from dadt.train.norm import norms, together
from dadt.train.prediction.base import Holds, Prediction, Tensors, beside_parameters, tensors_of
from dadt.train.prediction.gpu import Kernel
from dadt.train.prediction.memory import address
from dadt.train.prediction.next_step import Factors, ParameterStep, next_steps
from dadt.train.prediction.rows import LastColumns, Row, beside, grouped, in_core

_gradient, _version, _is_cuda = map(attrgetter, ("grad", "_version", "is_cuda"))

Gradients = list[torch.Tensor | None]
"""One gradient for each parameter, in the parameters' order; None for a parameter without gradient."""
Term = tuple[Gradients, torch.Tensor | float]
"""One term of a weighted sum: gradients, and their common weight."""
DAMPING = 0.5
"""Weight, relative to the share, of the last known gap between a rank's gradient and the average; it keeps ranks'
predictions from drifting apart."""

_SOME = 8
"""Number of gradients whose norms show by how much the script scales all gradients."""


def share_of(ranks: int) -> float:
    """Return the share of a rank's own gradient in the gradient it expects: smaller with more ranks, at least 0.5.

    The own gradient differs from the mean by sqrt(ranks - 1) times the mean's noise; see docs/results/accuracy.md.
    """
    return max(0.5, 0.9 / math.sqrt(max(1, ranks - 1)))


class Expectation(Prediction):
    """Runs forward and backward at the weights to which the optimizer would step, at step t, with the gradient

    share * own(t) + (1 - share) * average(t-1) + DAMPING * share * (own(t-1) - average(t-1)),

    where own(t) is the rank's own gradient in flight and average(t-1) the last average that has arrived.

    The mean of the ranks' predictions is then near the true next weights, since the mean of their own gradients is the
    average in flight. The last term has mean 0. Without it, a rank's error returns in its next gradient with the
    opposite sign, and grows if rate * curvature * share is above 1; with it, if that is above 2 (docs/algorithms.md).
    Own gradients stay where autograd has put them, and averages where they arrived, until one pass computes the
    predicted weights from them. (Prediction by the optimizer's step with old gradients: XPipe, arXiv:1911.04610. The
    rank's own part of the gradients in flight is added here.)
    """

    needs = 1
    sees_gradients = True

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], share: float) -> None:
        super().__init__(parameters)
        self.share = share
        self._optimizer = weakref.ref(optimizer)
        self._came: tuple[Gradients, list[int]] = ([], [])
        """The averaged gradients as they arrived, and their autograd versions."""
        self._sampled: list[torch.Tensor] = []
        """A few of the parameters, whose averaged gradients show by how much the script scales all gradients."""
        self._came_norms: list[torch.Tensor] = []
        """Norms of the averaged gradients of the parameters in `_sampled`, as they arrived."""
        self._came_scale: torch.Tensor | float = 1.0
        """Loss scale of the averages that arrived last."""
        self._clip: torch.Tensor | float = 1.0
        """Factor by which the script has scaled the last averages, as gradient clipping does."""
        self._own: Gradients = []
        """This rank's own gradients that were just sent."""
        self._previous: Gradients = []
        """This rank's own gradients of the step before the last; empty if not known."""
        self._previous_scale: torch.Tensor | float = 1.0
        """Loss scale of the gradients that were sent before the last ones."""
        self._terms: list[Term] = []
        """Terms of the expected gradient; empty once the buffers contain their sum."""
        self._versions: list[list[int]] = []
        """Autograd versions of the gradients in the expected gradient's terms, from which a change is detected."""
        self._in_place = False
        """Whether the script sets gradients to zero in place, which overwrites averages in the same memory."""
        self._copies: dict[int, list[torch.Tensor]] = {}
        """Memory for copies of this rank's own gradients, by the parameter's id."""
        self._kernel = Kernel()
        """Computes the next weights of parameters on a GPU."""
        self._seen: dict[int, LastColumns] = {}
        """For each group of parameters with equal factors, the tensors that the C++ core's loops accept."""
        self._absent: set[int] = set()
        """Ids of parameters without an expected gradient, which the optimizer will skip."""

    def before_step(self, *, late: bool, scale: torch.Tensor | None, delivery: Set[int] = frozenset()) -> None:
        super().before_step(late=late, scale=scale, delivery=delivery)
        if not self._buffers:
            self._buffers = [torch.empty_like(p.data) for p in self.parameters]
        if late:
            self._own = self._keep_own(delivery)
            self._absent = {id(p) for p, g in zip(self.parameters, self._own, strict=True) if g is None}
            self._holds = Holds.OWN
        elif self._holds is Holds.AVERAGE:  # the first late step, in which no average arrives
            self._expect_first(scale, delivery)

    def _keep_own(self, delivery: Set[int]) -> Gradients:
        """Return this rank's own gradients until the step after the next, copied where averages will arrive."""
        kept = self._gradients()
        if delivery.isdisjoint(map(address, _present(kept))):
            return kept
        for i, (p, g) in enumerate(zip(self.parameters, kept, strict=True)):
            if g is not None and g.data_ptr() in delivery:
                self._in_place = True
                memory = self._copies.setdefault(id(p), [])
                memory.append(memory.pop(0) if len(memory) > 1 else torch.empty_like(g))
                kept[i] = memory[-1].copy_(g)
        return kept

    def _expect_first(self, scale: torch.Tensor | None, delivery: Set[int]) -> None:
        """Compute the first expected gradient from the average of the last synchronous step, which is in the buffers,
        and this rank's own gradients in `.grad`."""
        self._previous = self._keep_own(delivery)
        self._absent &= {id(p) for p, g in zip(self.parameters, self._previous, strict=True) if g is None}
        self._previous_scale = 1.0 if scale is None else scale
        own = self.share * self._clip / self._previous_scale
        self._sum(self._buffers, (list(self._buffers), 1 - self.share), (self._previous, own))
        self._holds = Holds.KNOWN if _finite(self._buffers) else Holds.NOTHING

    def arrived(self, scale: torch.Tensor | None) -> None:
        averages = shards.gradients(self.owners) if self.sharded else list(map(_gradient, self.owners))
        given = [p for p, g in zip(self.owners, averages, strict=True) if g is not None and g.numel()]
        self._came = averages, [g._version for g in averages if g is not None]
        step = max(1, len(given) // _SOME)
        self._sampled = given[step // 2 :: step]
        self._came_norms, self._came_scale = _norms_of(self._sampled), 1.0 if scale is None else scale

    def after_step(self, *, held: bool, scale: torch.Tensor | None) -> None:
        if held and self._holds is Holds.OWN:
            self.forget()  # the averages belong to other parameters
        if held or not self._buffers:
            return
        changed = self._changed()
        self._clip = self._clipped() if changed else 1.0
        if self._holds is not Holds.OWN:
            self._absent = self._copy_gradients(self._buffers)
            self._holds = Holds.AVERAGE
            return
        self._expect(1.0 if scale is None else scale)
        # The GPU's kernel ignores NaN and infinite gradients, so the host need not wait to check for them.
        if self._on_gpu:
            if self._in_place:
                self._settle()
        elif changed or scale is not None:
            self._settle()
            if not _finite(self._buffers):
                # A gradient scaler, or a script that checks norms, will skip the step of gradients that are not finite;
                # or a fused optimizer has just skipped such a step by itself.
                self.forget()
        elif self._in_place:
            self._settle()

    def _expect(self, scale: torch.Tensor | float) -> None:
        """Set the terms of the expected gradient: this rank's own gradients just sent, those that it sent one step
        before, and the averages in `.grad`. scale: loss scale of the gradients just sent."""
        gradients = self._gradients()
        average, terms = 1 - self.share, [(self._own, self.share * self._clip / scale)]
        if self._previous:
            before = DAMPING * self.share
            average -= before
            terms.insert(0, (self._previous, before * self._clip / self._previous_scale))
        self._terms = [*terms, (gradients, average)]
        self._versions = _versions(self._terms)
        self._absent -= {id(p) for p, g in zip(self.parameters, gradients, strict=True) if g is not None}
        self._previous, self._own = self._own, []
        self._previous_scale = scale
        self._holds = Holds.KNOWN

    @property
    def _on_gpu(self) -> bool:
        parameters = self.parameters
        return bool(parameters) and parameters[0].is_cuda and all(map(_is_cuda, parameters))

    @property
    def _has_changed(self) -> bool:
        """Whether the script has written to gradients since the step, so that the expectation is no longer valid."""
        return bool(self._terms) and _versions(self._terms) != self._versions

    def _settle(self) -> None:
        """Write the expected gradient into the buffers before the gradients that are its terms change."""
        terms, self._terms = self._terms, []
        self._sum(self._buffers, *terms)

    def _gradients(self) -> Gradients:
        found = shards.gradients(self.owners) if self.sharded else list(map(_gradient, self.owners))
        return [g if g is None or g.layout is torch.strided else g.to_dense() for g in found]

    def _copy_gradients(self, buffers: list[torch.Tensor]) -> set[int]:
        """Copy the gradients into the buffers, or zeros for parameters without one. Returns the ids of these
        parameters."""
        rows = list(zip(self.parameters, buffers, self._gradients(), strict=True))
        there = [(b, g) for _, b, g in rows if g is not None]
        if there:
            torch._foreach_copy_([b for b, _ in there], [g for _, g in there])
        for _, b, g in rows:
            if g is None:
                b.zero_()
        return {id(p) for p, _, g in rows if g is None}

    def _changed(self) -> bool:
        """Whether the script has clipped or otherwise changed the averages. Averages of sharded parameters always count
        as changed."""
        (came, versions), self._came = self._came, ([], [])
        if len(came) != len(self.parameters):
            return False
        now = map(_gradient, self.owners)
        return self.sharded or not all(map(is_, came, now)) or list(map(_version, _present(came))) != versions

    def _clipped(self) -> torch.Tensor | float:
        # Leave out gradients that the script has removed meanwhile, for example by freezing parameters.
        left = [(p, norm) for p, norm in zip(self._sampled, self._came_norms, strict=True) if p.grad is not None]
        if not left:
            return 1.0
        sampled, came = zip(*left, strict=True)
        before, now = together(came), together(_norms_of(sampled))
        ratio = now * beside(now, self._came_scale) / before.to(now.device)
        ratio = torch.where(torch.isfinite(ratio), ratio, 1.0)
        return float(ratio) if ratio.device.type == "cpu" else ratio

    def _sum(self, into: list[torch.Tensor], *terms: Term) -> None:
        """Write the sum of weight * tensor into `into`, over tensors that are not None. `into` may be the first term's
        tensors."""
        if not terms:
            return
        columns, weights = zip(*terms, strict=True)
        for row in zip(into, *columns, strict=True):
            b, parts = row[0], [part for part in zip(row[1:], weights, strict=True) if part[0] is not None]
            if not parts:
                b.zero_()
            elif in_core(row):
                sources, factors = [t.data_ptr() for t, _ in parts], [float(weight) for _, weight in parts]
                _core.reduce(DTYPES[b.dtype], _core.Reduction.sum, b.data_ptr(), sources, factors, 1.0, b.numel())
            else:
                (first, weight), *others = parts
                torch.mul(first, beside(first, weight), out=b)
                for t, weight in others:
                    b.add_(t * beside(t, weight))

    def _go_ahead(self) -> bool:
        optimizer = self._optimizer()
        if self._has_changed:
            return False
        terms, self._terms = self._terms, []
        ids = list(map(id, self.parameters))
        ahead = dict(zip(ids, self._buffers, strict=True))
        for absent in self._absent:
            ahead.pop(absent, None)
        columns, weights = zip(*terms, strict=True) if terms else ((), ())
        rows = dict(zip(ids, zip(*columns, strict=True) if terms else [()] * len(ids), strict=True))
        on_gpu = self._on_gpu
        counted = on_gpu and self._kernel.works
        groups = next_steps(optimizer, ahead, counted=counted) if optimizer is not None else ()
        for i, group in enumerate(groups):
            # Column `without` contains the gradients that were sent one step before the last. It is not remembered, so
            # that the memory of gradients that are not needed any more can be reused.
            seen = self._seen.setdefault(i, LastColumns(without=len(ParameterStep._fields)))
            if on_gpu:
                moving = [(*step, *(rows[id(step.parameter)] or (step.expected,))) for step in group.steps]
                self._kernel.foresee(group, moving, weights or (1.0,), seen)
            else:
                self._foresee(group.factors, group.steps, rows, [float(weight) for weight in weights], seen)
        for p, b in zip(self.parameters, self._buffers, strict=True) if ahead or self._absent else ():
            # the optimizer skips this parameter, or has not yet updated it, so that its next step is not known
            if id(p) in ahead or id(p) in self._absent:
                b.copy_(p.data)
        return True

    def _foresee(
        self,
        factors: Factors,
        steps: Sequence[ParameterStep],
        rows: Mapping[int, Row],
        weights: Sequence[float],
        seen: LastColumns,
    ) -> None:
        """Write the weights after the optimizer's next step into the buffers of these parameters."""
        groups, others = grouped([(*step, *rows[id(step.parameter)]) for step in steps], seen)
        for dtype, counts, (parameters, ahead, momenta, squares, *sources) in groups:
            next_step = _core.NextStep(**factors)
            _core.foresee(dtype, counts, parameters, ahead, momenta, squares, next_step, sources, weights)
        left = {id(row[0]) for row in others}
        for step in steps:
            if id(step.parameter) not in left:
                continue
            row = rows[id(step.parameter)]
            self._sum([step.expected], *(([g], weight) for g, weight in zip(row, weights, strict=True)))
            step.expected.copy_(step.ahead(factors))

    def join(self, averages: Tensors, scale: torch.Tensor | None) -> None:
        if averages and self._holds is not Holds.AVERAGE:
            self.undo()
            self._buffers, self._absent = tensors_of(self.owners, averages), self._without(averages)
            clip = self._clip if scale is None else self._clip / scale
            for b in self._buffers:
                b.mul_(clip)
            self._terms, self._previous = [], []
            self._holds = Holds.KNOWN
            if not _finite(self._buffers):
                self.forget()  # the optimizer will skip averages that are not finite

    def state(self) -> dict[str, Any]:
        known = self._holds is Holds.AVERAGE
        rows = zip(self.owners, self.parameters, self._buffers, strict=True) if known else ()
        average = {p: b for p, part, b in rows if id(part) not in self._absent}
        return {"clip": float(self._clip), "average": average}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.forget()
        self._clip = state.get("clip", 1.0)
        if average := state.get("average"):
            self._buffers, self._absent = tensors_of(self.owners, average), self._without(average)
            self._holds = Holds.AVERAGE

    def _without(self, values: Tensors) -> set[int]:
        return {id(part) for p, part in zip(self.owners, self.parameters, strict=True) if p not in values}

    def observe(self) -> dict[str, Any]:
        known = self._holds is Holds.KNOWN and not self._has_changed
        return {
            **super().observe(),
            "clip": self._clip,
            "expected": list(self._buffers) if known and not self._terms else [],
            "terms": [[list(gradients), weight] for gradients, weight in self._terms] if known else [],
            "previous": list(self._previous),
            "scale": self._previous_scale,
            "absent": [i for i, p in enumerate(self.parameters) if id(p) in self._absent],
            "in_place": self._in_place,
        }

    def restore(self, own: Mapping[str, Any], common: Mapping[str, Any]) -> bool:
        every = [own["expected"], own["previous"], *(gradients for gradients, _ in own["terms"])]
        fits = super().restore(own, common) and all(len(each) in (0, len(self.parameters)) for each in every)
        if not fits:
            self.forget()
            return False
        self._clip, self._previous_scale = map(self._beside, (own["clip"], own["scale"]))
        self._in_place = own["in_place"]
        self._absent = {id(self.parameters[i]) for i in own["absent"]}
        self._previous = beside_parameters(self.parameters, own["previous"]) if own["previous"] else []
        if own["expected"]:
            self._buffers, self._holds = beside_parameters(self.parameters, own["expected"]), Holds.KNOWN
        elif own["terms"]:
            self._terms = [(beside_parameters(self.parameters, each), self._beside(w)) for each, w in own["terms"]]
            self._versions = _versions(self._terms)
            self._buffers, self._holds = [torch.empty_like(p.data) for p in self.parameters], Holds.KNOWN
        return True

    def _beside(self, weight: torch.Tensor | float) -> torch.Tensor | float:
        return weight.to(self.parameters[0].device) if isinstance(weight, torch.Tensor) and self.parameters else weight

    def _keep(self, parameters: Sequence[torch.Tensor]) -> None:
        if self._has_changed:
            self.forget()
        self._settle()
        super()._keep(parameters)
        if self._own:
            self._own = list(self._kept(self._own, parameters))
        if self._previous:
            self._previous = list(self._kept(self._previous, parameters))
        self._copies = {}

    def forget(self) -> None:
        super().forget()
        self._terms, self._own, self._previous = [], [], []
        self._seen = {}

    def end(self) -> None:
        super().end()
        self._copies = {}


def _present(gradients: Gradients) -> list[torch.Tensor]:
    return [g for g in gradients if g is not None]


def _versions(terms: Sequence[Term]) -> list[list[int]]:
    return [list(map(_version, _present(gradients))) for gradients, _ in terms]


def _norms_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each parameter's gradient."""
    gradients = _present(shards.gradients(parameters))
    return norms([g if g.layout is torch.strided else g.to_dense() for g in gradients])


def _finite(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(torch.isfinite(together(norms(tensors))))
