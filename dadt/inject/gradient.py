"""Averages gradients before anything uses them ahead of the optimizer's step, so that gradient clipping and the
gradient scaler work on the averages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from dadt.inject.after_import import after_import
from dadt.inject.module import Modules
from dadt.inject.patch import replaces
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
        """Average the gradients of all optimizers that train any of these parameters. gradients: whether `tensors` are
        the parameters' gradients instead."""
        ids = {id(t) for t in tensors}
        runtime.begin()
        if gradients:
            ids = {id(p) for a in runtime.attachments for p in a.parameters if id(p.grad) in ids}
        for attachment in runtime.attachments.sharing(ids):
            consume(attachment)

    for name in _OF_PARAMETERS:
        if hasattr(torch.nn.utils, name):
            _average_before(name, consume_of)
    if hasattr(torch.nn.utils, "get_total_norm"):
        _average_before_norm(runtime, consume_of)

    def of_fsdp(module: ModuleType) -> None:
        @replaces("clip_grad_norm_", module.FullyShardedDataParallel)
        def clip_grad_norm_(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            consume_of(self.parameters())
            return clip_grad_norm_.__wrapped__(self, *args, **kwargs)

    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", of_fsdp)

    def tell(scaler: GradScaler, attachments: Iterable[Attachment]) -> None:
        """Record the loss scale of this step's gradients for each optimizer, since clipping or compression may use the
        gradients before they are unscaled."""
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

    @replaces("scale", GradScaler)
    def scale(self: GradScaler, outputs: Any) -> Any:
        result = scale.__wrapped__(self, outputs)
        tell(self, runtime.attachments)
        return result

    @replaces("unscale_", GradScaler)
    def unscale_(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scaled(self, optimizer)
        unscale_.__wrapped__(self, optimizer)

    @replaces("step", GradScaler)
    def step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        attachment = scaled(self, optimizer)
        result = step.__wrapped__(self, optimizer, *args, **kwargs)
        if attachment is not None and attachment.consumed:
            attachment.skipped()
        return result


def _average_before(name: str, consume: Callable[..., None]) -> None:
    """Patch a function that uses the gradients of its first argument, the parameters, so that these gradients are
    averaged first."""

    @replaces(name, torch.nn.utils, clip_grad)
    def patched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        consume(parameters)
        return patched.__wrapped__(parameters, *args, **kwargs)


def _average_before_norm(runtime: Runtime, consume: Callable[..., None]) -> None:
    """Patch get_total_norm, which is called with gradients, so that these are averaged first. Averaging may put other
    tensors into `.grad`, so the gradients are then read again from their parameters."""

    @replaces("get_total_norm", torch.nn.utils, clip_grad)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners = {id(p.grad): p for a in runtime.attachments for p in a.parameters if p.grad is not None}
        mine = [owners.get(id(t)) for t in tensors]
        consume(tensors, gradients=True)
        averaged = [t if p is None else p.grad for t, p in zip(tensors, mine, strict=True)]
        return get_total_norm.__wrapped__([t for t in averaged if t is not None], *args, **kwargs)
