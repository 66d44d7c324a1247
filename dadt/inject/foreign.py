"""Finds optimizers of other libraries than torch, such as fastai's, by their methods, and averages gradients at their
steps.

Each such optimizer gets a Carrier: a torch optimizer over the same parameters, whose step runs the original step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dadt.errors import DadtError
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime
from dadt.train.stand_in import StandIn

DEPTH = 6
"""Maximum nesting depth of lists, dictionaries and objects to search for an optimizer's parameters."""


class Carrier(StandIn):
    """An optimizer of torch that stands for another library's optimizer wherever DADT needs one of torch's. Its state
    consists of the other optimizer's tensors, all stored under the first parameter once a step has created them."""

    def __init__(self, owner: Any, parameters: list[torch.Tensor], values: dict[str, Any] | None = None) -> None:
        """values: options of the only parameter group, such as its momentum, which DADT needs to predict weights."""
        super().__init__(parameters, values or {})
        self.owner = owner
        self.title = owner.__class__.__name__
        self.unsuited = f"the step of {self.title} is not known"
        self.run: Callable[[], Any] = nothing
        """Runs the other optimizer's own step with the arguments of the script's latest call."""

    def step(self, closure: Any = None) -> Any:
        result = self.run()
        if not self.state:
            self.state[self._first] = self.kept()
        return result

    def kept(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the other optimizer's state, by names that are the same on all ranks."""
        given = set(map(id, self.param_groups[0]["params"]))
        found: list[torch.Tensor] = []
        for tensor in _tensors(self.owner, DEPTH):
            if id(tensor) not in given:
                given.add(id(tensor))
                found.append(tensor)
        return {str(number): tensor for number, tensor in enumerate(found)}

    def state_dict(self) -> dict[str, Any]:
        if self.state:
            self.state[self._first] = self.kept()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not state_dict["state"]:  # the state was saved before the optimizer's first step
            return
        mine, given = self.kept(), state_dict["state"].get(0, {})
        self.state[self._first] = mine
        if {name: t.shape for name, t in mine.items()} != {name: t.shape for name, t in given.items()}:
            raise DadtError(f"the state of {self.title} is that of another optimizer")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(given[name])

    @property
    def _first(self) -> torch.Tensor:
        parameter: torch.Tensor = self.param_groups[0]["params"][0]
        return parameter


def nothing() -> None:
    """The step of a carrier whose optimizer does not step."""


def adopt(runtime: Runtime) -> None:
    """Find all optimizers that are not torch's, and let DADT average gradients at their steps, and at those of all of
    the same types that the script builds later."""
    carriers: dict[int, Carrier] = {}
    kinds: dict[type, None] = {}
    for each in gc.get_objects():
        if _steps(type(each)) and _carry(each, carriers, runtime) is not None:
            kinds[type(each)] = None
    if carriers:  # a replay has no gradients, so it cannot rebuild the state of such optimizers
        runtime.replay.take_no_snapshots("they could not hold the state of such an optimizer")
    for kind in kinds:
        _average_first(kind, carriers, runtime)


def _carry(owner: Any, carriers: dict[int, Carrier], runtime: Runtime) -> Carrier | None:
    """Return a new carrier of this optimizer, for parameters that none of torch's optimizers has, and none of others
    that it wraps or that wraps it; None if there are none that train. It ends with the optimizer."""
    parts = set(map(id, _inside(owner, DEPTH))) if carriers else set()
    wrapped = [each for key, each in carriers.items() if key in parts or _is_inside(owner, each.owner)]
    others = [*(each for each in runtime.optimizers if not isinstance(each, Carrier)), *wrapped]
    taken = {id(p) for optimizer in others for group in optimizer.param_groups for p in group["params"]}
    parameters = list({id(p): p for p in _parameters(owner, DEPTH) if id(p) not in taken}.values())
    if not any(p.requires_grad for p in parameters):
        return None
    try:
        weakref.finalize(owner, carriers.pop, id(owner), None).atexit = False
        carrier = Carrier(weakref.proxy(owner), parameters)
    except TypeError:  # a type with slots, of which no weak references can be made
        carrier = Carrier(owner, parameters)
    carriers[id(owner)] = carrier
    runtime.ranks.say(f"{type(owner).__name__} is none of torch's optimizers: averaged at its step all the same")
    return carrier


def _steps(kind: type) -> bool:
    """Return whether the class has the methods of an optimizer. Classes are examined instead of objects, because
    reading an object's attributes may run code."""
    if issubclass(kind, Optimizer | nn.Module) or str(kind.__module__).partition(".")[0] in ("torch", "dadt"):
        return False
    methods = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return all(isinstance(methods.get(name), FunctionType) for name in ("step", "zero_grad"))


def _parameters(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the optimizer's parameters, those that are frozen for now, too."""
    return (t for t in _tensors(value, depth) if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter)))


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    return (each for each in _inside(value, depth) if isinstance(each, torch.Tensor))


def _is_inside(part: Any, value: Any) -> bool:
    return any(each is part for each in _inside(value, DEPTH))


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """Yield the value, and what its members and their members contain."""
    yield value
    if depth and not isinstance(value, torch.Tensor | nn.Module | type | FunctionType | str):
        inside = value if isinstance(value, list | tuple | set) else ()
        members = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        for each in (*inside, *(members.values() if isinstance(members, dict) else ())):
            yield from _inside(each, depth - 1)


def _average_first(kind: type, carriers: dict[int, Carrier], runtime: Runtime) -> None:
    @replaces("step", kind)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        carrier = carriers.get(id(self)) or _carry(self, carriers, runtime)
        if carrier is None:
            return step.__wrapped__(self, *args, **kwargs)
        if any(callable(each) for each in (*args, *kwargs.values())):
            raise DadtError(
                f"{type(self).__name__}.step was given a closure: DADT averages before the step of an optimizer that is"
                " none of torch's, so call backward before it, and step() without a closure"
            )
        carrier.run = lambda: step.__wrapped__(self, *args, **kwargs)
        try:
            return carrier.step()
        finally:
            carrier.run = nothing  # which would keep the optimizer alive
