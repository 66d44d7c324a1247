"""Detects and refuses optimizers that change weights during the backward, before DADT could average gradients, as LOMO
does by hooks on parameters."""

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
"""Number of backwards in which DADT checks that weights do not change, if the script has put hooks on parameters."""


def install(runtime: Runtime) -> None:
    """Patch `torch.autograd.backward` to check whether the first backwards change weights, if parameters have hooks
    that might do so."""
    looks: weakref.WeakKeyDictionary[Attachment, int] = weakref.WeakKeyDictionary()
    """Number of backwards still to check for each attached optimizer."""

    def looks_at(attachment: Attachment) -> bool:
        left = looks.get(attachment)
        if left is None:
            left = _LOOKS if any(map(_has_hooks, attachment.parameters)) else 0
        looks[attachment] = max(0, left - 1)
        return left > 0

    @replaces("backward", torch.autograd)
    def backward(*args: Any, **kwargs: Any) -> Any:
        looked = [(a, _sums(a), runtime.ranks.step) for a in runtime.attachments if looks_at(a)]
        result = backward.__wrapped__(*args, **kwargs)
        for a, before, step in looked:
            if step == runtime.ranks.step and _sums(a) != before:
                raise ConfigError(
                    f"{type(a.optimizer).__name__} changes weights within the backward, before gradients are averaged:"
                    " use an optimizer that changes them in its step, or --inject none to train each rank by itself"
                )
        return result


def _has_hooks(parameter: torch.Tensor) -> bool:
    names = ("_post_accumulate_grad_hooks", "_backward_hooks")
    return any(getattr(parameter, name, None) for name in names)


def _sums(attachment: Attachment) -> list[int]:
    return [checksum(p) for p in attachment.parameters if p.layout is torch.strided]
