"""Registers optimizers when a script creates them, and averages gradients at their steps."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from dadt.inject.draws import draws_from_torch_alone, random_state
from dadt.inject.module import Modules
from dadt.inject.patch import replaces
from dadt.inject.second_order import Derivatives
from dadt.train import evaluation
from dadt.train.attachment import Attachment
from dadt.train.checkpoint import KEY, Checkpoints, Randomness
from dadt.train.optimizer_state import is_torchs, keeps_elsewhere
from dadt.train.runtime import Runtime


class Steps:
    """The optimizers' steps in progress. If a step() calls the step() of another optimizer with the same parameters,
    both count as one step."""

    def __init__(self, runtime: Runtime, modules: Modules) -> None:
        self._runtime, self._ranks = runtime, runtime.ranks
        self._script, self._optimizers = runtime.script, runtime.optimizers
        self.modules = modules
        self._under_way: list[tuple[FrameType, Optimizer, Attachment | None]] = []
        self.derivatives = Derivatives(runtime)
        self.inside: Attachment | None = None
        """The attachment of the optimizer whose step is running its own code (not a closure of the script); else
        None."""
        self._backwards: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Number of backwards that the script had begun when each optimizer's last step ended."""

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        with self._timed(), self._runtime.replay.aside():
            return self._before(sys._getframe(1), optimizer, args, kwargs)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._after(sys._getframe(1), optimizer)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = perf_counter()
        try:
            yield
        finally:
            self._ranks.progress.hook_seconds += perf_counter() - begun

    def _before(self, frame: FrameType, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._under_way = [step for step in self._under_way if is_caller(step[0], frame)]
        if any(_share_parameters(outer, optimizer) for _, outer, _ in self._under_way):
            return None
        if self._ranks.alone:
            self._under_way.append((frame, optimizer, None))
            if self._runtime.hooked:
                if optimizer not in self._optimizers.roots:
                    self.modules.find(optimizer)
                self.modules.step_begins(optimizer)
            self._runtime.begin()
            return None
        refuse_capture()
        left = self._script.explicit or optimizer in self._optimizers.left_alone
        if optimizer not in self._optimizers.roots and not left:
            self.modules.find(optimizer)
        attachment = self._attachment(optimizer)
        if attachment is not None and not attachment.consumed:
            attachment.scale = None  # no scaler, which would have averaged before
        self._under_way.append((frame, optimizer, attachment))
        if attachment is None:
            return None
        if attachment.step == 0 and self._runtime.replay.possible and keeps_elsewhere(optimizer):
            self._runtime.replay.take_no_snapshots("they could not hold the state of such an optimizer")
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure) and self._ranks.together:
            if self._comes_after_backward(optimizer, attachment):
                if not attachment.has_closure:
                    evaluation.begin(attachment, f"{type(optimizer).__name__} is given a closure after a backward")
                self.modules.step_begins(optimizer)
                evaluation.before(attachment)
                evaluation.average(attachment, 0.0)
            averaged = Closure(closure, attachment, self)
            if len(args) > 1:
                return (args[0], averaged, *args[2:]), kwargs
            return args, {**kwargs, "closure": averaged}
        own = [] if is_torchs(optimizer) else self.derivatives.of(attachment)
        if own and not attachment.has_closure:
            evaluation.begin(attachment, f"{type(optimizer).__name__} differentiates its gradients")
        use_gradients(attachment, self.modules)
        self.derivatives.give_graphs(own)
        return None

    def take(self, frame: FrameType, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the optimizer's own step, unless it has to be skipped, and complete it before torch calls the post hooks.
        frame: frame of the hooks' caller."""
        attachment = next((each for under_way, _, each in self._under_way[::-1] if under_way is frame), None)
        if attachment is None:
            return step(*args, **kwargs)
        result = None if _withholds(attachment) else self._take(attachment, step, args, kwargs)
        self._after(frame, args[0])
        return result

    def _take(self, attachment: Attachment, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            self.inside = attachment
            with self._alike(attachment):
                return step(*args, **kwargs)
        except Withheld as withheld:
            return withheld.loss
        finally:
            self.inside = None
            self.derivatives.end()

    def averaging(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `backward` wrapped to average gradients immediately when an optimizer's step calls it."""

        @functools.wraps(backward)
        def averaged(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            attachment = self.inside
            if attachment is not None and self._ranks.together and self._script.on_training_thread:
                if not attachment.has_closure:
                    evaluation.begin(attachment, f"{type(attachment.optimizer).__name__} evaluates within its step")
                evaluation.before(attachment)
                evaluation.average(attachment, 0.0)
            return result

        return averaged

    @contextmanager
    def _alike(self, attachment: Attachment) -> Iterator[None]:
        """A context in which a step draws the same random numbers on all ranks, as a single process would."""
        streams = self._runtime.checkpoints.streams
        if streams is None or is_torchs(attachment.optimizer) or not attachment.algorithm.identical:
            yield
            return
        only_torch = draws_from_torch_alone(attachment.optimizer)
        drawn = None
        with streams.shared(only_torch=only_torch):
            before = random_state(only_torch) if self._runtime.replay.possible else None
            yield
            drawn = before is not None and before != random_state(only_torch)
        if drawn:
            name = type(attachment.optimizer).__name__
            self._runtime.replay.take_no_snapshots(f"steps of {name} draw random numbers, and a replay takes none")

    def _comes_after_backward(self, optimizer: Optimizer, attachment: Attachment) -> bool:
        """Return whether an optimizer that is called with a closure already has gradients from a backward, which it may
        use before it calls the closure, as SAM does. Always False for torch's own optimizers, which do not use them."""
        if is_torchs(optimizer) or self._script.backwards == self._backwards.get(optimizer, 0):
            return False
        return any(p.grad is not None for p in attachment.parameters)

    def _after(self, frame: FrameType, optimizer: Optimizer) -> None:
        with self._timed():
            self._end(frame, optimizer)

    def _end(self, frame: FrameType, optimizer: Optimizer) -> None:
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
        self._backwards[optimizer] = self._script.backwards
        # A script that calls `dadt.init` decides itself which optimizers DADT leaves alone, so none is counted.
        left_alone = optimizer in self._optimizers.left_alone and not self._script.explicit
        self._runtime.stepped(attachment, left_alone=left_alone)

    def _attachment(self, optimizer: Optimizer) -> Attachment | None:
        """Return the optimizer's attachment. If clipping has averaged the gradients for another optimizer with the same
        parameters, return the attachment of that one."""
        attachment = self._runtime.attachment(optimizer)
        if attachment is None or attachment.consumed or self._optimizers.trains_one:
            return attachment
        ids = {id(p) for p in attachment.parameters}
        consumed = [a for a in self._runtime.attachments if a.consumed and {id(p) for p in a.parameters} == ids]
        return consumed[-1] if consumed else attachment


class Withheld(BaseException):
    """Raised in a closure if no averages have arrived yet, so that the optimizer's step ends right after the closure
    and changes nothing."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


class Closure:
    """Replaces a script's closure during one step. Most optimizers call the closure once, before they use gradients, so
    the averages are put in place right after it. For LBFGS and similar optimizers, every evaluation is averaged over
    ranks."""

    def __init__(self, closure: Callable[[], Any], attachment: Attachment, steps: Steps) -> None:
        functools.update_wrapper(self, closure)
        self._attachment = attachment
        self._steps, self._modules = steps, steps.modules
        self._closure = self._apart(closure, self._modules.runtime.checkpoints.streams)
        self._weights = [] if attachment.has_closure else _versions(attachment)
        self._uses_loss = not is_torchs(attachment.optimizer)
        """Whether the step may depend on the loss, which then has to be the same on all ranks."""
        self.calls = 0

    def __call__(self) -> Any:
        inside, self._steps.inside = self._steps.inside, None
        try:
            return self._called()
        finally:
            self._steps.inside = inside

    def _called(self) -> Any:
        a = self._attachment
        self.calls += 1
        if not a.has_closure and (why := self._evaluates()):
            evaluation.begin(a, why)
        if not a.has_closure:
            loss = self._closure()
            if self._uses_loss:
                a.agreement.loss = _number(loss)
            use_gradients(a, self._modules)
            if _withholds(a):
                raise Withheld(loss)
            return _like(loss, a.agreement.mean_loss) if self._uses_loss else loss
        if self.calls == 1:
            self._modules.step_begins(a.optimizer)
        evaluation.before(a)
        loss = self._closure()
        return _like(loss, evaluation.average(a, _number(loss)))

    def _apart(self, closure: Callable[[], Any], streams: Randomness | None) -> Callable[[], Any]:
        """Return the closure wrapped so that each rank draws random numbers of its own in it, as for dropout."""
        if streams is None or is_torchs(self._attachment.optimizer):
            return closure
        only_torch = draws_from_torch_alone(self._attachment.optimizer)

        def drawing() -> Any:
            with streams.apart(only_torch=only_torch):
                return closure()

        return drawing

    def _evaluates(self) -> str:
        """Return why each evaluation of the closure has to be averaged immediately; empty if the optimizer calls the
        closure only once."""
        name = type(self._attachment.optimizer).__name__
        if isinstance(self._attachment.optimizer, torch.optim.LBFGS) or self.calls > 1:
            return f"{name} evaluates its closure more than once in a step"
        if self._weights != _versions(self._attachment):
            return f"{name} changes weights before it evaluates its closure"
        return ""


def use_gradients(attachment: Attachment, modules: Modules) -> None:
    """Put averaged gradients into `.grad` for the optimizer's step. If no average has arrived yet, remove the gradients
    from `.grad`."""
    if not attachment.consumed:
        modules.step_begins(attachment.optimizer)
    attachment.average_gradients()
    attachment.withhold_gradients()


def _withholds(attachment: Attachment) -> bool:
    """Return whether the optimizer's step must change nothing, because no averages have arrived yet."""
    return attachment.stepping and attachment.algorithm.holds


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def _like(loss: Any, value: float) -> Any:
    return loss.new_tensor(value) if isinstance(loss, torch.Tensor) else value


def _versions(attachment: Attachment) -> list[int]:
    return [p._version for p in attachment.parameters]


def is_caller(frame: FrameType, of: FrameType | None) -> bool:
    """Return whether `frame` is `of` or one of its callers, so that its code is still running. torch calls no post hook
    if a step raises an error."""
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
    @replaces("__init__", Optimizer)
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init.__wrapped__(self, *args, **kwargs)
        runtime.optimizers.register(self)
        if runtime.hooked and not runtime.script.explicit:
            modules.find(self)

    steps = Steps(runtime, modules)
    if not runtime.ranks.alone:
        _patch_groups_and_zeroing(runtime, modules)
        _patch_states(runtime, runtime.checkpoints)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau):
            _note_schedulers(runtime, kind)
        _patch_steps(steps)
        steps.derivatives.install()
        torch.autograd.backward = steps.averaging(torch.autograd.backward)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)


def _note_schedulers(runtime: Runtime, kind: type[Any]) -> None:
    @replaces("__init__", kind)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        init.__wrapped__(self, *args, **kwargs)
        if not runtime.ranks.alone:
            runtime.optimizers.schedule(self)


def _patch_steps(steps: Steps) -> None:
    """Patch the wrapper around optimizers' steps, so that steps can be skipped, which hooks cannot do."""
    hooked = Optimizer.profile_hook_step

    @functools.wraps(hooked)
    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def taken(*args: Any, **kwargs: Any) -> Any:
            return steps.take(sys._getframe(1), step, args, kwargs)

        return hooked(taken)

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[assignment]


def _patch_groups_and_zeroing(runtime: Runtime, modules: Modules) -> None:
    @replaces("add_param_group", Optimizer)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        add_param_group.__wrapped__(self, param_group)
        if not runtime.ranks.alone and runtime.attachments.of(self) is not None:
            modules.find(self)

    @replaces("zero_grad", Optimizer)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        attachment = runtime.attachments.of(self)
        if attachment is not None and attachment.consumed:
            runtime.attachments.discard_averages({id(p) for p in attachment.parameters})
        zero_grad.__wrapped__(self, *args, **kwargs)


def _patch_states(runtime: Runtime, checkpoints: Checkpoints) -> None:
    """Patch saving and loading of optimizers' states, to include what DADT needs to resume training exactly."""

    @replaces("state_dict", Optimizer)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        with runtime.replay.aside():
            more = checkpoints.save(self)
        state: dict[str, Any] = state_dict.__wrapped__(self)
        return state if more is None else {**state, KEY: more}

    @replaces("load_state_dict", Optimizer)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        load_state_dict.__wrapped__(self, state_dict)
        checkpoints.load(self, state_dict)
