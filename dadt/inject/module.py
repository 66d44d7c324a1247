"""Detects training forwards of modules, and shows the script true weights, not predicted ones, at all other times."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from dadt.inject import foreign
from dadt.inject.cuda_graphs import refuse_capture
from dadt.inject.ddp import Wrappers
from dadt.inject.gathered import GatheredWeights
from dadt.inject.patch import replaces
from dadt.inject.roots import all_modules, by_parameters
from dadt.train.attachment import Attachment
from dadt.train.common_values import take_means
from dadt.train.prediction.base import traces
from dadt.train.runtime import Runtime
from dadt.train.stand_in import name_of

_UNSEEN_STEPS = 3
_PASSES_WITHOUT = 10
_PASSING_ON = ("OptimizedModule", "DistributedDataParallel", "DataParallel")
"""Classes of wrappers that call the module inside them, or a compiled version or copy of it."""


class CallEntry:
    """Runs DADT's code around every call of one module. It is stored in the module's attribute that torch reserves for
    compiled calls.

    torch leaves this attribute out of pickles and copies. Modules without a CallEntry run at full speed, and
    torch.compile ignores the attribute, so that its graph has no break.
    """

    def __init__(self, modules: Modules, module: nn.Module, call: Callable[..., Any] | None) -> None:
        self._modules = modules
        self._module = weakref.ref(module)
        self._call = call
        self.calls = 0
        """Number of the module's calls so far while gradients were enabled."""
        self._was_training = True
        self._trained_in_eval = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        call = self._call or module._call_impl
        if torch._C._get_tracing_state():  # torch.jit.trace cannot trace DADT's own code
            return call(*args, **kwargs)
        with self._modules.runtime.replay.aside():
            return self._called(module, call, args, kwargs)

    def _called(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._modules.stand_in is not None:
            return self._modules.stand_in(module, self._modules.wrappers.unanswered(call), args, kwargs)
        scope = self._modules.runtime.prediction_scope
        if torch.is_grad_enabled():
            self._count(module)
            if module.training or self._trained_in_eval or not self._modules.runtime.script.began:
                self._modules.forward_begins(module, (args, kwargs))
                with scope.training_pass(), self._modules.wrappers.quiet():
                    return call(*args, **kwargs)
        look = self._modules.gathered.true_weights(self._modules.attachments(module))
        with look, self._modules.wrappers.quiet():
            return call(*args, **kwargs)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle and copy this object as None, because some modules pickle all their attributes, as DDP does."""
        return type(None), ()

    def withdraw(self, module: nn.Module) -> None:
        if self._call is None:
            del module.__dict__["_compiled_call_impl"]
        else:
            module.__dict__["_compiled_call_impl"] = self._call

    def _count(self, module: nn.Module) -> None:
        self.calls += 1
        self._was_training = module.training

    def stepped(self) -> None:
        """Called when an optimizer's step follows calls of the module: record whether the module is trained in eval
        mode."""
        self._trained_in_eval = not self._was_training


class Modules:
    """Finds the modules whose parameters an optimizer trains, and decides whether the script sees true or predicted
    weights in them."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.wrappers = Wrappers(runtime)
        self.gathered = GatheredWeights(runtime)
        self.stand_in: Callable[..., Any] | None = None
        """In a replay, the function called instead of a module, with the module, its original call, and the arguments;
        else None."""
        self.saw: list[Callable[[Any], None]] = []
        """Functions called with the arguments of each training forward."""
        self._optimizers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[torch.optim.Optimizer]] = (
            weakref.WeakKeyDictionary()
        )
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[CallEntry, int]] = weakref.WeakKeyDictionary()
        """For each optimizer, the number of calls of each CallEntry up to the optimizer's last step."""
        self._unseen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Number of consecutive steps of each optimizer before which no call of its modules was seen."""

    # Which modules belong to an optimizer ----------------------------------------------------------------------

    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Install a CallEntry in the topmost modules that contain the optimizer's parameters."""
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        modules = [m for m in all_modules() if "_parameters" in m.__dict__ and "_modules" in m.__dict__]
        parents: dict[nn.Module, list[nn.Module]] = {}
        for m in modules:
            for child in m._modules.values():
                if child is not None:
                    parents.setdefault(child, []).append(m)
        level = {m for m in modules if any(id(p) in ids for p in m._parameters.values())}
        roots: dict[nn.Module, None] = {}
        seen: set[nn.Module] = set()
        while level:
            seen |= level
            roots.update((m, None) for m in level if m not in parents)
            level = {p for m in level for p in parents.get(m, ())} - seen
        if self.wrappers.leaves_alone(optimizer, seen):
            return
        self.wrappers.notice(seen)
        ordered = by_parameters(roots, optimizer)
        self.runtime.optimizers.roots[optimizer] = [weakref.ref(m) for m in ordered]
        if not ordered and self.runtime.attachments.of(optimizer) is None:
            self.runtime.optimizers.built_apart(optimizer)
        for m in ordered:
            self.enter(m, optimizer)
            for inner in (child for name, child in m._modules.items() if name == "_orig_mod" and child is not None):
                self._leave(inner, optimizer)

    def enter(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.setdefault(module, weakref.WeakSet()).add(optimizer)
        if not isinstance(module.__dict__.get("_compiled_call_impl"), CallEntry):
            # Not by setattr, because torch.compile's wrapper would set the attribute in the module that it wraps.
            module.__dict__["_compiled_call_impl"] = CallEntry(self, module, module.__dict__.get("_compiled_call_impl"))

    def _leave(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remove the CallEntry of a module that is called through a wrapper, which would trace or copy the entry."""
        self._optimizers.setdefault(module, weakref.WeakSet()).add(optimizer)
        entry = module.__dict__.get("_compiled_call_impl")
        if isinstance(entry, CallEntry):
            entry.withdraw(module)

    def wrapped(self, parent: nn.Module, child: nn.Module) -> None:
        """Called when a module becomes a child of another one. If the parent is a wrapper, it gets the CallEntry
        instead of the child."""
        self.wrappers.notice([parent])
        for optimizer in list(self._optimizers.get(child, ())):
            if self.wrappers.leaves_alone(optimizer, [parent]):
                continue
            if any(base.__name__ in _PASSING_ON for base in type(parent).__mro__):
                self.enter(parent, optimizer)
                self._leave(child, optimizer)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer's step: in each topmost module that was not called, install a CallEntry in its
        children."""
        seen = self._seen.setdefault(optimizer, {})
        called = False
        modules = [m for m, optimizers in self._optimizers.items() if optimizer in optimizers]
        for module in modules:
            entry = module.__dict__.get("_compiled_call_impl")
            if not isinstance(entry, CallEntry):
                continue
            if entry.calls > seen.get(entry, 0):
                called = True
                entry.stepped()
            elif type(module).__name__ != "OptimizedModule":
                self._enter_children(module, optimizer)
            seen[entry] = entry.calls
        self._unseen[optimizer] = 0 if called else self._unseen.get(optimizer, 0) + 1
        attachment = self.runtime.attachments.of(optimizer)
        if self._unseen[optimizer] >= _UNSEEN_STEPS and attachment is not None:
            # A compiled function calls the model without DADT's code, so the model has used the buffers shown to the
            # script.
            self.runtime.buffers.keep_shown(attachment.modules)
            if attachment.algorithm.predicts and attachment.prediction.wanted:
                why = (
                    "its model's calls are not seen, as inside a compiled function"
                    if modules
                    else "it trains no module"
                )
                advice = "; where that is so, compile the model instead" if modules else ""
                self.runtime.ranks.say(
                    f"{name_of(optimizer)}: {why}: its gradients are delayed without prediction{advice}"
                )

    def _enter_children(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for child in module._modules.values():
            if child is not None and any(id(p) in ids for p in child.parameters()):
                self.enter(child, optimizer)

    # What happens around forward passes ------------------------------------------------------------------------

    def attachments(self, module: nn.Module) -> list[Attachment]:
        known = self.runtime.attachments
        return [a for a in known if a.alive and a.optimizer in self._optimizers.get(module, ())]

    def forward_begins(self, module: nn.Module, given: Any) -> None:
        if traces():  # during tracing, parameters have no memory to exchange
            return
        self.runtime.begin()
        for callback in self.saw:
            callback(given)
        self.runtime.buffers.hide_training()
        for attachment in self.attachments(module):
            attachment.broadcast_new_parameters()
            attachment.agreement.saw(given)
            if attachment.algorithm.predicts and not attachment.consumed:
                self._predict(attachment)

    def _predict(self, attachment: Attachment) -> None:
        if not self.runtime.prediction_scope.in_backward or attachment.prediction.applied:
            self.gathered.training_begins(attachment)
            attachment.prediction.apply()
        else:
            # This forward, within a backward, recomputes one that ran on true weights with gradients disabled, so it
            # has to use true weights, too.
            attachment.prediction.barred = attachment.prediction.wanted

    # True weights whenever the script reads weights ------------------------------------------------------------

    def mode_changed(self, module: nn.Module, training: bool) -> None:
        """Called after eval() or train() of a module: after eval(), show true weights and averaged buffers; after
        train(), the rank's own buffers."""
        if training:
            self.runtime.buffers.hide(module)
        else:
            self.runtime.buffers.show(module)
        if not training and module in self._optimizers:
            for attachment in self.attachments(module):
                attachment.prediction.undo()

    def reveal(self, module: nn.Module) -> list[Attachment]:
        """Show true weights and averaged buffers in the module, before state_dict() or load_state_dict(). Return the
        attachments of the optimizers that train it."""
        ids = {id(p) for p in module.parameters()}
        mine = [a for a in self.runtime.attachments if not ids.isdisjoint(a.prediction.given)]
        for attachment in mine:
            attachment.prediction.undo()
        for m in module.modules():
            self.runtime.buffers.show(m)
        return mine

    def loaded(self, module: nn.Module, mine: Iterable[Attachment]) -> None:
        """Called after load_state_dict(): forget what DADT has stored of the previous weights and buffers. mine:
        attachments of the module's optimizers."""
        for attachment in mine:
            attachment.loaded()
        for m in module.modules():
            self.runtime.buffers.forget(m)


def install(modules: Modules) -> None:
    """Patch methods of nn.Module, and the methods by which Parameter is copied. Only classes are changed, so that the
    script's objects look unchanged."""
    runtime = modules.runtime
    runtime.events.on_claim.append(modules.wrappers.decide)

    @replaces("train", nn.Module)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        result: nn.Module = train.__wrapped__(self, mode)
        modules.mode_changed(self, mode)
        return result

    @replaces("state_dict", nn.Module)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Only for the outermost call: recursive calls for child modules pass a destination.
        if not args and kwargs.get("destination") is None:
            modules.reveal(self)
        return state_dict.__wrapped__(self, *args, **kwargs)

    @replaces("load_state_dict", nn.Module)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mine = modules.reveal(self)
        result = load_state_dict.__wrapped__(self, *args, **kwargs)
        modules.loaded(self, mine)
        return result

    @replaces("compile", nn.Module)
    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        entry = self.__dict__.pop("_compiled_call_impl", None)
        compile.__wrapped__(self, *args, **kwargs)
        if isinstance(entry, CallEntry):
            entry._call = self.__dict__["_compiled_call_impl"]
            self.__dict__["_compiled_call_impl"] = entry

    @replaces("zero_grad", nn.Module)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(a.consumed for a in runtime.attachments):
            runtime.attachments.discard_averages({id(p) for p in self.parameters()})
        zero_grad.__wrapped__(self, *args, **kwargs)

    for name in ("__deepcopy__", "__reduce_ex__"):
        setattr(nn.Parameter, name, _true_first(getattr(nn.Parameter, name), runtime))
    _show_copies(runtime)
    torch.autograd.grad = _predicted_first(torch.autograd.grad, runtime)
    torch.autograd.backward = _counted(_predicted_first(torch.autograd.backward, runtime), runtime)

    def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            modules.wrapped(parent, child)

    nn.modules.module.register_module_module_registration_hook(registered)


def _true_first(copy: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Return `copy` wrapped so that copies and pickles of parameters contain true weights, not predicted ones."""

    @functools.wraps(copy)
    def patched(self: nn.Parameter, *args: Any) -> Any:
        for attachment in runtime.attachments:
            if attachment.prediction.applied and id(self) in attachment.prediction.given:
                attachment.prediction.undo()
        return copy(self, *args)

    return patched


def _predicted_first(backward: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(backward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        with runtime.prediction_scope.backward():
            return backward(*args, **kwargs)

    return patched


def _counted(backward: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Return `backward` wrapped so that each backward is counted, and reported to the attachments. Warns after a few
    backwards without any optimizer that DADT knows, while the user can still end the job."""
    passes = 0

    @functools.wraps(backward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        refuse_capture()
        runtime.script.backwards += 1
        for attachment in runtime.attachments:
            attachment.backward_begins()
        if not runtime.optimizers.registered:
            passes += 1
            if passes in (1, _PASSES_WITHOUT):
                foreign.adopt(runtime)
        if passes == _PASSES_WITHOUT and not runtime.optimizers.registered:
            passes += 1
            runtime.ranks.say(
                f"{_PASSES_WITHOUT} backward passes, and there is no torch.optim.Optimizer: DADT averages nothing,"
                " and each worker trains for itself unless the script averages",
                level="warning",
            )
        return backward(*args, **kwargs)

    return patched


def _show_copies(runtime: Runtime) -> None:
    """Patch copying and pickling of modules, and torch's averages of models (AveragedModel), so that they contain the
    buffers averaged over ranks."""
    if "__getstate__" in nn.Module.__dict__:

        @replaces("__getstate__", nn.Module)
        def getstate(self: nn.Module) -> Any:
            runtime.buffers.show(self)
            return getstate.__wrapped__(self)

    @replaces("update_parameters", AveragedModel)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        for m in model.modules():
            runtime.buffers.show(m)
        # The average needs true weights, because the script may update it between a backward and the optimizer's step.
        with runtime.prediction_scope.true_weights([a.prediction for a in runtime.attachments]):
            update_parameters.__wrapped__(self, model)

    @replaces("update_bn", swa_utils)
    def update_bn(loader: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        update_bn.__wrapped__(loader, model, *args, **kwargs)
        for m in model.modules():
            runtime.buffers.forget(m)
        # Take means, because each rank saw only its share of the data
        if runtime.attachments and runtime.ranks.together:
            take_means(runtime.ranks, [b for b in model.buffers() if b.is_floating_point()], "update_bn")
