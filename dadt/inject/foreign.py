"""Finds optimizers of other libraries than torch, such as fastai's, by their methods, and averages gradients at their
steps.

Each such optimizer gets a Carrier: a torch optimizer over the same parameters, whose step runs the original step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dadt.errors import DadtError
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

DEPTH = 6
"""Maximum nesting depth of lists, dictionaries and objects to search for an optimizer's parameters."""


class Carrier(Optimizer):
    """An optimizer of torch that stands for another library's optimizer wherever DADT needs one of torch's. Its state
    consists of the other optimizer's tensors, all stored under the first parameter once a step has created them."""

    def __init__(self, owner: Any, parameters: list[torch.Tensor], values: dict[str, Any] | None = None) -> None:
        """values: options of the only parameter group, such as its momentum, which DADT needs to predict weights."""
        super().__init__(parameters, values or {})
        self.owner = owner
        self.run: Callable[[], Any] = lambda: None
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
            raise DadtError(f"the state of {self.owner.__class__.__name__} is that of another optimizer")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(given[name])

    @property
    def _first(self) -> torch.Tensor:
        parameter: torch.Tensor = self.param_groups[0]["params"][0]
        return parameter


def adopt(runtime: Runtime) -> None:
    """Find all optimizers that are not torch's, and let DADT average gradients at their steps."""
    seen: set[int] = set()
    carriers: dict[int, Carrier] = {}
    for each in gc.get_objects():
        if not _steps(type(each)):
            continue
        parameters = [p for p in _parameters(each, DEPTH) if id(p) not in seen]
        if not parameters:
            continue
        seen.update(map(id, parameters))
        unique = list({id(p): p for p in parameters}.values())
        carriers[id(each)] = Carrier(each, unique)
        runtime.ranks.say(f"{type(each).__name__} is none of torch's optimizers: averaged at its step all the same")
    if carriers:  # a replay has no gradients, so it cannot rebuild the state of such optimizers
        runtime.replay.take_no_snapshots("they could not hold the state of such an optimizer")
    for kind in {type(carrier.owner) for carrier in carriers.values()}:
        _average_first(kind, carriers)


def _steps(kind: type) -> bool:
    """Return whether the class has the methods of an optimizer. Classes are examined instead of objects, because
    reading an object's attributes may run code."""
    if issubclass(kind, Optimizer | nn.Module) or str(kind.__module__).partition(".")[0] in ("torch", "dadt"):
        return False
    methods = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return all(isinstance(methods.get(name), FunctionType) for name in ("step", "zero_grad"))


def _parameters(value: Any, depth: int) -> Iterator[torch.Tensor]:
    return (t for t in _tensors(value, depth) if t.requires_grad and t.is_leaf)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module | type | FunctionType | str):
        inside = value if isinstance(value, list | tuple | set) else ()
        members = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        for each in (*inside, *(members.values() if isinstance(members, dict) else ())):
            yield from _tensors(each, depth - 1)


def _average_first(kind: type, carriers: dict[int, Carrier]) -> None:
    @replaces("step", kind)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        carrier = carriers.get(id(self))
        if carrier is None:
            return step.__wrapped__(self, *args, **kwargs)
        if any(callable(each) for each in (*args, *kwargs.values())):
            raise DadtError(
                f"{type(self).__name__}.step was given a closure: DADT averages before the step of an optimizer that is"
                " none of torch's, so call backward before it, and step() without a closure"
            )
        carrier.run = lambda: step.__wrapped__(self, *args, **kwargs)
        return carrier.step()
