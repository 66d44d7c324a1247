"""Optimizers: noticed when they are built, averaged when they step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dadt.errors import DadtError
from dadt.inject.cuda_graphs import refuse_capture
from dadt.inject.module import Modules
from dadt.train import evaluation
from dadt.train.attachment import Attachment
from dadt.train.checkpoint import KEY, Checkpoints
from dadt.train.runtime import Runtime


class Steps:
    """The optimizer steps under way, outermost only: a step() that calls super().step(), or wraps another optimizer
    of the same parameters, is one step."""

    def __init__(self, runtime: Runtime, modules: Modules) -> None:
        self._runtime = runtime
        self._modules = modules
        self._under_way: list[tuple[FrameType, Optimizer, Attachment | None]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        begun = perf_counter()
        try:
            with self._runtime.aside():
                return self._before(sys._getframe(1), optimizer, args, kwargs)
        finally:
            self._runtime.progress.hook_seconds += perf_counter() - begun

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        begun = perf_counter()
        try:
            self._after(sys._getframe(1), optimizer)
        finally:
            self._runtime.progress.hook_seconds += perf_counter() - begun

    def _before(self, frame: FrameType, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._under_way = [step for step in self._under_way if is_caller(step[0], frame)]
        if any(_share_parameters(outer, optimizer) for _, outer, _ in self._under_way):
            return None
        if self._runtime.alone:
            self._under_way.append((frame, optimizer, None))
            self._runtime.begin()
            return None
        refuse_capture()
        left = self._runtime.explicit or optimizer in self._runtime.left_alone
        if optimizer not in self._runtime.roots and not left:
            self._modules.find(optimizer)
        attachment = self._attachment(optimizer)
        if attachment is not None and not attachment.consumed:
            attachment.scale = None  # a scaler would have used the gradients before
        self._under_way.append((frame, optimizer, attachment))
        if attachment is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure) and self._runtime.together:
            averaged = Closure(closure, attachment, self._modules)
            if len(args) > 1:
                return (args[0], averaged, *args[2:]), kwargs
            return args, {**kwargs, "closure": averaged}
        use_gradients(attachment, self._modules)
        return None

    def _after(self, frame: FrameType, optimizer: Optimizer) -> None:
        ended = [step for step in self._under_way if step[0] is frame]
        if not ended:
            return
        self._under_way = [step for step in self._under_way if step[0] is not frame]
        attachment = ended[0][2]
        if attachment is not None:
            if not attachment.consumed and not attachment.has_closure:
                raise DadtError(
                    f"{type(optimizer).__name__}.step did not call the closure that it was given, and has used"
                    " gradients that are not averaged: call backward before it, and step() without a closure"
                )
            attachment.stepped()
        self._runtime.stepped(attachment, left_alone=optimizer in self._runtime.left_alone)

    def _attachment(self, optimizer: Optimizer) -> Attachment | None:
        """The optimizer's, or that of another one of the same parameters for which clipping has averaged already."""
        attachment = self._runtime.attachment(optimizer)
        if attachment is None or attachment.consumed or self._runtime.trains_one:
            return attachment
        ids = {id(p) for p in attachment.parameters}
        consumed = [a for a in self._runtime.attachments if a.consumed and {id(p) for p in a.parameters} == ids]
        return consumed[-1] if consumed else attachment


class Closure:
    """A script's closure during one step. torch's optimizers call it once, before anything else, and use the gradients
    then: so they come as late as without a closure. LBFGS and what turns out to be like it evaluate by themselves."""

    def __init__(self, closure: Callable[[], Any], attachment: Attachment, modules: Modules) -> None:
        functools.update_wrapper(self, closure)
        self._closure = closure
        self._attachment = attachment
        self._modules = modules
        self._weights = [] if attachment.has_closure else _versions(attachment)
        self.calls = 0

    def __call__(self) -> Any:
        a = self._attachment
        self.calls += 1
        if not a.has_closure and (why := self._evaluates()):
            evaluation.begin(a, why)
        if not a.has_closure:
            loss = self._closure()
            use_gradients(a, self._modules)
            return loss
        if self.calls == 1:
            self._modules.step_begins(a.optimizer)
        evaluation.before(a)
        loss = self._closure()
        mean = evaluation.average(a, float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        return loss.new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

    def _evaluates(self) -> str:
        """Why the optimizer's evaluations are averaged at once; empty if it uses one as if there were no closure."""
        name = type(self._attachment.optimizer).__name__
        if isinstance(self._attachment.optimizer, torch.optim.LBFGS) or self.calls > 1:
            return f"{name} evaluates its closure more than once in a step"
        if self._weights != _versions(self._attachment):
            return f"{name} changes weights before it evaluates its closure"
        return ""


def use_gradients(attachment: Attachment, modules: Modules) -> None:
    """The optimizer's next look at its gradients is that of its step."""
    if not attachment.consumed:
        modules.step_begins(attachment.optimizer)
    attachment.average_gradients()
    attachment.withhold_gradients()


def _versions(attachment: Attachment) -> list[int]:
    return [p._version for p in attachment.parameters]


def is_caller(frame: FrameType, of: FrameType | None) -> bool:
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
        if not runtime.alone and not runtime.explicit:
            modules.find(self)

    Optimizer.__init__ = patched_init  # type: ignore[method-assign]
    if not runtime.alone:
        _patch_groups_and_zeroing(runtime, modules)
        _patch_states(runtime, runtime.checkpoints)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
            _note_schedulers(runtime, kind)
    steps = Steps(runtime, modules)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)


def _note_schedulers(runtime: Runtime, kind: type[Any]) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not runtime.alone:
            runtime.schedule(self)

    setattr(kind, "__init__", patched_init)  # noqa: B010 (mypy minds else)


def _patch_groups_and_zeroing(runtime: Runtime, modules: Modules) -> None:
    add, zero = Optimizer.add_param_group, Optimizer.zero_grad

    @functools.wraps(add)
    def patched_add(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        if not runtime.alone and runtime.attached(self) is not None:
            modules.find(self)

    @functools.wraps(zero)
    def patched_zero(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        attachment = runtime.attached(self)
        if attachment is not None and attachment.consumed:
            runtime.discard_averages({id(p) for p in attachment.parameters})
        zero(self, *args, **kwargs)

    Optimizer.add_param_group = patched_add  # type: ignore[method-assign]
    Optimizer.zero_grad = patched_zero  # type: ignore[method-assign]


def _patch_states(runtime: Runtime, checkpoints: Checkpoints) -> None:
    """Put what a resumed training needs beside the optimizer's state into that state."""
    save, load = Optimizer.state_dict, Optimizer.load_state_dict

    @functools.wraps(save)
    def patched_save(self: Optimizer) -> dict[str, Any]:
        with runtime.aside():
            more = checkpoints.save(self)
        state_dict = save(self)
        return state_dict if more is None else {**state_dict, KEY: more}

    @functools.wraps(load)
    def patched_load(self: Optimizer, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        checkpoints.load(self, state_dict)

    Optimizer.state_dict = patched_save  # type: ignore[method-assign]
    Optimizer.load_state_dict = patched_load  # type: ignore[method-assign]
