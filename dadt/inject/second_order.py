"""Averages gradients for optimizers that differentiate them, as AdaHessian does after `backward(create_graph=True)`.

An averaged gradient has no autograd graph, so it gets the graph of the rank's own gradient. The derivatives that the
step computes through this graph are averaged as well. If all ranks multiply by the same vectors, the mean over ranks of
Hessian-vector products is the product for the mean loss.
"""

from __future__ import annotations

from typing import Any

import torch

from dadt.inject.patch import replaces
from dadt.train.attachment import Attachment
from dadt.train.runtime import Runtime


class _WithGraph(torch.autograd.Function):
    """Returns an averaged gradient, which autograd differentiates as if it were the rank's own gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        return average.clone()  # a clone and not a view, which scripts could not detach in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Derivatives:
    """Averages over ranks the derivatives that optimizers compute from their gradients within a step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._weight: float | None = None
        """This rank's weight in the averages of the current step; None outside of steps that differentiate their
        gradients."""
        self._taken = 0

    def install(self) -> None:
        """Patch `torch.autograd.grad`, so that what it returns within a step is averaged."""

        @replaces("grad", torch.autograd)
        def grad(*args: Any, **kwargs: Any) -> Any:
            found = grad.__wrapped__(*args, **kwargs)
            if self._weight is not None and self._runtime.script.on_training_thread:
                self._taken += 1
                with torch.no_grad():
                    tensors = [t for t in found if t is not None]
                    self._runtime.ranks.average(tensors, f"second derivatives {self._taken}", self._weight)
            return found

    def of(self, attachment: Attachment) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the optimizer's parameters whose gradients have an autograd graph, each with its gradient."""
        self._weight = None
        found = [(p, p.grad) for p in attachment.parameters if p.grad is not None and p.grad.grad_fn is not None]
        if found:
            self._weight = attachment.weighing.settle(again=True)
        return found

    def give_graphs(self, own: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give the averaged gradients the autograd graphs of the original ones. To be called once averages have
        replaced them. own: parameters with their original gradients."""
        for p, gradient in own:
            if p.grad is not None:
                with torch.enable_grad():
                    p.grad = _WithGraph.apply(gradient, p.grad)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._weight = None
