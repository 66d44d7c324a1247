"""The next weights of a GPU's parameters: by one kernel, or by tensor operations where Triton is missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec

import torch

from dadt.train.prediction.next_step import Group, ParameterStep
from dadt.train.prediction.rows import LastColumns, Row, beside, by_kind

Weights = Sequence[torch.Tensor | float]
_STEP = len(ParameterStep._fields)


class Kernel:
    """A row is a Step, whose `expected` is where its next weights are put, and behind it what the gradient that is
    expected is the sum of, which may be that memory. Where the result is no number, it is the weight as it is."""

    @cached_property
    def works(self) -> bool:
        return find_spec("triton") is not None

    @cached_property
    def _launch(self) -> Callable[..., None]:
        from dadt.train.prediction import gpu_kernel

        return gpu_kernel.KernelLauncher().foresee

    def foresee(self, group: Group, rows: Sequence[Row], weights: Weights, seen: LastColumns) -> None:
        """Compute the next weights of these parameters. weights: of the parts of the sum."""
        kinds, others = by_kind(rows, seen)
        for (dtype, device), some in kinds.items():
            fits = device.type == "cuda" and dtype is not torch.float64
            if not (fits and self.works and self._launched(group, some, weights)):
                others += some
        for row in others:
            _foresee(group, row, weights)

    def _launched(self, group: Group, rows: Sequence[Row], weights: Weights) -> bool:
        """Compute them by the Triton kernel. Returns whether that worked."""
        try:
            self._launch(group, rows, weights)
        except Exception as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self.works = False
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            warnings.warn(f"dadt predicts weights by many small kernels, as Triton cannot be used: {why}", stacklevel=1)
        return self.works


def _foresee(group: Group, row: Row, weights: Weights) -> None:
    step, parts = ParameterStep._make(row[:_STEP]), row[_STEP:]
    w = step.parameter.detach()
    expected = torch.zeros_like(w)
    for part, weight in zip(parts, weights, strict=True):
        if part is not None:
            expected += part * beside(part, weight)
    ahead = step._replace(expected=expected).ahead(_factors(group, step))
    step.expected.copy_(torch.where(ahead.isfinite(), ahead, w))


def _factors(group: Group, step: ParameterStep) -> dict[str, float]:
    if group.counts is None:
        return group.factors
    at = next(i for i, each in enumerate(group.steps) if each.parameter is step.parameter)
    return group.counts.factors(float(group.counts.steps[at]))
