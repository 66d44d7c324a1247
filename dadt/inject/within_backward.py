"""Refuses optimizers that change weights within the backward, as LOMO does by hooks on parameters, before gradients
could be averaged."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dadt.errors import ConfigError
from dadt.inject.patch import replaces
from dadt.train.attachment import Attachment
from dadt.train.replicas import checksum
from dadt.train.runtime import Runtime

_LOOKS = 3
"""Number of backwards to check if parameters have hooks of the script."""


class BackwardWatch:
    """Checks whether the first backwards change weights, if parameters have hooks that might do so."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._left: weakref.WeakKeyDictionary[Attachment, int] = weakref.WeakKeyDictionary()
        """Number of backwards still to check for each attached optimizer."""

    def install(self) -> None:
        @replaces("backward", torch.autograd)
        def backward(*args: Any, **kwargs: Any) -> Any:
            looked = [(a, _sums(a), self._runtime.ranks.step) for a in self._runtime.attachments if self._looks_at(a)]
            result = backward.__wrapped__(*args, **kwargs)
            for a, before, step in looked:
                if step == self._runtime.ranks.step and _sums(a) != before:
                    self._refuse(a)
            return result

    def _looks_at(self, attachment: Attachment) -> bool:
        left = self._left.get(attachment)
        if left is None:
            left = _LOOKS if any(map(_has_hooks, attachment.parameters)) else 0
        self._left[attachment] = max(0, left - 1)
        return left > 0

    def _refuse(self, attachment: Attachment) -> None:
        raise ConfigError(
            f"{type(attachment.optimizer).__name__} changes weights within the backward, before gradients are averaged:"
            " use an optimizer that changes them in its step, or --inject none to train each rank by itself"
        )


def _has_hooks(parameter: torch.Tensor) -> bool:
    names = ("_post_accumulate_grad_hooks", "_backward_hooks")
    return any(getattr(parameter, name, None) for name in names)


def _sums(attachment: Attachment) -> list[int]:
    return [checksum(p) for p in attachment.parameters if p.layout is torch.strided]
