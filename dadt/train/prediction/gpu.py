"""Computes the weights after the optimizer's next step for parameters on a GPU, by one Triton kernel, or by tensor
operations if Triton is not available."""

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
    """Computes the weights after the optimizer's next step. Each row contains the tensors of one ParameterStep, of
    which `expected` receives the computed weights, and then the terms of the expected gradient, one of which may share
    the memory of `expected`. If a result is NaN or infinite, the weight stays as it is.
    """

    @cached_property
    def works(self) -> bool:
        return find_spec("triton") is not None

    @cached_property
    def _launch(self) -> Callable[..., None]:
        from dadt.train.prediction import gpu_kernel

        return gpu_kernel.KernelLauncher().foresee

    def foresee(self, group: Group, rows: Sequence[Row], weights: Weights, seen: LastColumns) -> None:
        """Compute the next weights of the parameters in these rows. weights: the factor of each term of the expected
        gradient."""
        kinds, others = by_kind(rows, seen)
        for (dtype, device), some in kinds.items():
            fits = device.type == "cuda" and dtype is not torch.float64
            if not (fits and self.works and self._launched(group, some, weights)):
                others += some
        for row in others:
            _foresee(group, row, weights)

    def _launched(self, group: Group, rows: Sequence[Row], weights: Weights) -> bool:
        """Compute next weights by the Triton kernel. Returns whether that worked."""
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
