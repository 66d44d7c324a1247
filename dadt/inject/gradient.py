"""Averages gradients that are used before the optimizer's step, so that gradient clipping and the gradient scaler see
the averages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from dadt.inject.module import Modules
from dadt.train.attachment import Attachment
from dadt.train.runtime import Runtime

_OF_PARAMETERS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")


def average(runtime: Runtime, modules: Modules, attachment: Attachment) -> None:
    """Put the averaged gradients into `.grad`, for code that uses them before the optimizer's step."""
    with runtime.replay.aside():
        if not attachment.consumed:
            modules.step_begins(attachment.optimizer)
        attachment.average_gradients()


def install(runtime: Runtime, modules: Modules) -> None:
    consume = functools.partial(average, runtime, modules)

    def consume_of(tensors: Iterable[torch.Tensor], *, gradients: bool = False) -> None:
        """Average the gradients of all optimizers that train any of these tensors. gradients: the tensors are
        gradients, not parameters."""
        ids = {id(t) for t in tensors}
        runtime.begin()
        if gradients:
            ids = {id(p) for a in runtime.attachments for p in a.parameters if id(p.grad) in ids}
        for attachment in runtime.attachments.sharing(ids):
            consume(attachment)

    for name in _OF_PARAMETERS:
        if hasattr(torch.nn.utils, name):
            _patch(name, _before_parameters(getattr(torch.nn.utils, name), consume_of))
    if hasattr(torch.nn.utils, "get_total_norm"):
        _patch("get_total_norm", _before_gradients(torch.nn.utils.get_total_norm, runtime, consume_of))
    scale, unscale, step = GradScaler.scale, GradScaler.unscale_, GradScaler.step

    def tell(scaler: GradScaler, attachments: Iterable[Attachment]) -> None:
        """Record for each attached optimizer the loss scale of this step's gradients, which may be clipped or sent
        before they are unscaled."""
        value = scaler._scale if scaler.is_enabled() else None
        token = None if value is None else (id(value), value._version)
        for attachment in attachments:
            if attachment.scale is None or attachment.scale_token != token:
                attachment.scale = None if value is None else value.clone()
                attachment.scale_token = token

    def scaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Attachment | None:
        attachment = runtime.attachment(optimizer)
        if attachment is not None:
            tell(scaler, [attachment])
            consume(attachment)
        return attachment

    @functools.wraps(scale)
    def patched_scale(self: GradScaler, outputs: Any) -> Any:
        result = scale(self, outputs)
        tell(self, runtime.attachments)
        return result

    @functools.wraps(unscale)
    def patched_unscale(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaled(self, optimizer)
        unscale(self, optimizer)

    @functools.wraps(step)
    def patched_step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        attachment = scaled(self, optimizer)
        result = step(self, optimizer, *args, **kwargs)
        if attachment is not None and attachment.consumed:
            attachment.skipped()
        return result

    GradScaler.scale = patched_scale  # type: ignore[method-assign]
    GradScaler.unscale_ = patched_unscale  # type: ignore[method-assign]
    GradScaler.step = patched_step  # type: ignore[method-assign]


def _patch(name: str, patched: Callable[..., Any]) -> None:
    setattr(torch.nn.utils, name, patched)
    if hasattr(clip_grad, name):
        setattr(clip_grad, name, patched)


def _before_parameters(original: Callable[..., Any], consume: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        consume(parameters)
        return original(parameters, *args, **kwargs)

    return patched


def _before_gradients(
    original: Callable[..., Any], runtime: Runtime, consume: Callable[..., None]
) -> Callable[..., Any]:
    """Return a replacement for get_total_norm, which is given gradients: after averaging, each gradient is looked up
    again, because the average may have replaced it."""

    @functools.wraps(original)
    def patched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners = {id(p.grad): p for a in runtime.attachments for p in a.parameters if p.grad is not None}
        mine = [owners.get(id(t)) for t in tensors]
        consume(tensors, gradients=True)
        averaged = [t if p is None else p.grad for t, p in zip(tensors, mine, strict=True)]
        return original([t for t in averaged if t is not None], *args, **kwargs)

    return patched
