"""Optimizers: noticed when they are built, averaged when they step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dadt.attachment import Attachment
from dadt.inject.module import Modules
from dadt.runtime import Runtime


class Steps:
    """The optimizer steps under way, outermost only: a step() that calls super().step(), or wraps another optimizer
    of the same parameters, is one step."""

    def __init__(self, runtime: Runtime, modules: Modules) -> None:
        self._runtime = runtime
        self._modules = modules
        self._under_way: list[tuple[FrameType, Optimizer]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        begun = perf_counter()
        try:
            return self._before(sys._getframe(1), optimizer, args, kwargs)
        finally:
            self._runtime.seconds += perf_counter() - begun

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        begun = perf_counter()
        try:
            self._after(sys._getframe(1), optimizer)
        finally:
            self._runtime.seconds += perf_counter() - begun

    def _before(self, frame: FrameType, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._under_way = [step for step in self._under_way if _is_caller(step[0], frame)]
        if any(_share_parameters(outer, optimizer) for _, outer in self._under_way):
            return None
        self._under_way.append((frame, optimizer))
        if self._runtime.alone:
            self._runtime.begin()
            return None
        if optimizer not in self._runtime.roots:
            self._modules.find(optimizer)
        self._modules.step_begins(optimizer)
        attachment = self._runtime.attachment(optimizer)
        if attachment is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure):
            averaged = self._average(attachment, closure)
            if len(args) > 1:
                return (args[0], averaged, *args[2:]), kwargs
            return args, {**kwargs, "closure": averaged}
        attachment.consume()
        attachment.hold_back()
        return None

    def _after(self, frame: FrameType, optimizer: Optimizer) -> None:
        if not any(step[0] is frame for step in self._under_way):
            return
        self._under_way = [step for step in self._under_way if step[0] is not frame]
        if self._runtime.alone:
            self._runtime.stepped(None)
            return
        attachment = self._runtime.attachment(optimizer)
        if attachment is not None:
            attachment.stepped()
        self._runtime.stepped(attachment)

    def _average(self, attachment: Attachment, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Gradients and loss of every evaluation, averaged at once: all ranks' line searches branch alike."""

        @functools.wraps(closure)
        def averaged() -> Any:
            loss = closure()
            mean = attachment.average_closure(float(loss))
            return loss.new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

        return averaged


def _is_caller(frame: FrameType, of: FrameType | None) -> bool:
    """Whether the frame still runs, below this one. (A step that raised has left without its post hook.)"""
    while of is not None:
        if of is frame:
            return True
        of = of.f_back
    return False


def _share_parameters(a: Optimizer, b: Optimizer) -> bool:
    if a is b:
        return True
    ids = {id(p) for group in a.param_groups for p in group["params"]}
    return any(id(p) in ids for group in b.param_groups for p in group["params"])


def install(runtime: Runtime, modules: Modules) -> None:
    init = Optimizer.__init__

    @functools.wraps(init)
    def patched_init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        runtime.register(self)
        if not runtime.alone:
            modules.find(self)

    Optimizer.__init__ = patched_init  # type: ignore[method-assign]
    steps = Steps(runtime, modules)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
