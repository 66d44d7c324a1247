"""Finds out by which number of samples or tokens the loss of each backward is divided, so that each rank's gradients
can be weighted by that number in the average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime


def install(runtime: Runtime) -> None:
    """Patch `torch.autograd.backward`, which `Tensor.backward` calls, to examine the losses. If the backwards of one
    step have different weights, each backward's gradients are multiplied by its weight."""

    @replaces("backward", torch.autograd)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        # A backward within another one, as for a checkpointed layer, belongs to the outer one.
        seen = not runtime.prediction_scope.in_backward and runtime.script.on_training_thread
        if seen and not runtime.replay.under_way:
            for attachment in runtime.attachments:
                factor = attachment.weighing.backward_begins(tensors)
                grad_tensors = grad_tensors if factor == 1 else _times(tensors, grad_tensors, factor)
        backward.__wrapped__(tensors, grad_tensors, *args, **kwargs)


def _times(tensors: Any, gradients: Any, factor: float) -> list[torch.Tensor]:
    """Return the start gradients of a backward (its grad_tensors) multiplied by a factor. gradients: None if the losses
    have one element each."""
    every: Sequence[torch.Tensor] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [gradients] if isinstance(gradients, torch.Tensor) else gradients or [None] * len(every)
    return [torch.full_like(t, factor) if g is None else g * factor for t, g in zip(every, given, strict=True)]
