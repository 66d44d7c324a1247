"""Optimizers that differentiate their gradients, as AdaHessian does after `backward(create_graph=True)`.

Averages have no graph. They are given that of the rank's own gradient, and what the step derives through it is averaged
as well: the mean over ranks of such products with second derivatives is that of the mean loss, if all ranks multiply by
the same vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dadt.train.attachment import Attachment
from dadt.train.runtime import Runtime


class _WithGraph(torch.autograd.Function):
    """An average, differentiated as the rank's own gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        return average.clone()  # no view, which scripts could not detach in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Derivatives:
    """The derivatives that optimizers take of their gradients within a step: averages them over ranks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._weight: float | None = None
        """This rank's weight in the averages of the step under way; None if the step differentiates nothing."""
        self._taken = 0

    def install(self) -> None:
        torch.autograd.grad = self._averaged(torch.autograd.grad)

    def of(self, attachment: Attachment) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The optimizer's parameters whose gradients have a graph, each with that gradient."""
        self._weight = None
        found = [(p, p.grad) for p in attachment.parameters if p.grad is not None and p.grad.grad_fn is not None]
        if found:
            self._weight = attachment.batch_weight.value
        return found

    def give_graphs(self, own: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Call this when averages have replaced these gradients: gives the averages the gradients' graphs."""
        for p, gradient in own:
            if p.grad is not None:
                with torch.enable_grad():
                    p.grad = _WithGraph.apply(gradient, p.grad)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._weight = None

    def _averaged(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if self._weight is not None and self._runtime.script.on_training_thread:
                self._taken += 1
                with torch.no_grad():
                    tensors = [t for t in found if t is not None]
                    self._runtime.ranks.average(tensors, f"second derivatives {self._taken}", self._weight)
            return found

        return grad
