"""Finds out by which denominators the losses of each backward are divided, so that ranks can be weighed by these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime


def install(runtime: Runtime) -> None:
    """Patch `torch.autograd.backward`, which `Tensor.backward` calls. If each backward of a step has a weight of its
    own, its gradients are multiplied by the weight."""

    @replaces("backward", torch.autograd)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        # A backward within another one, as of a checkpointed layer, is a part of the outer one.
        seen = not runtime.prediction_scope.in_backward and runtime.script.on_training_thread
        if seen and not runtime.replay.under_way:
            for attachment in runtime.attachments:
                factor = attachment.weighing.backward_begins(tensors)
                grad_tensors = grad_tensors if factor == 1 else _times(tensors, grad_tensors, factor)
        backward.__wrapped__(tensors, grad_tensors, *args, **kwargs)


def _times(tensors: Any, gradients: Any, factor: float) -> list[torch.Tensor]:
    """Return the gradients with which a backward begins, times a factor. gradients: None for losses of one element."""
    every: Sequence[torch.Tensor] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [gradients] if isinstance(gradients, torch.Tensor) else gradients or [None] * len(every)
    return [torch.full_like(t, factor) if g is None else g * factor for t, g in zip(every, given, strict=True)]
