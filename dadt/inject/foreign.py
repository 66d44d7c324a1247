"""Optimizers that are none of torch's, such as fastai's: found by their shape, averaged at their step.

Each gets a carrier, an optimizer of torch over the same parameters whose step is that of the other one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dadt.errors import DadtError
from dadt.train.runtime import Runtime

DEPTH = 6
"""How deep in lists, dictionaries and objects an optimizer may hold its parameters."""


class Carrier(Optimizer):
    """Takes the part of another optimizer wherever DADT needs one of torch's."""

    def __init__(self, owner: Any, parameters: list[torch.Tensor], values: dict[str, Any] | None = None) -> None:
        """values: of its one group, as its momentum, by which weights are predicted."""
        super().__init__(parameters, values or {})
        self.owner = owner
        self.run: Callable[[], Any] = lambda: None
        """The other optimizer's step that is under way."""

    def step(self, closure: Any = None) -> Any:
        return self.run()


def adopt(runtime: Runtime) -> None:
    """Find the optimizers that are none of torch's, and average at their steps from here on."""
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
        runtime.say(f"{type(each).__name__} is none of torch's optimizers: averaged at its step all the same")
    for kind in {type(carrier.owner) for carrier in carriers.values()}:
        _average_first(kind, carriers)


def _steps(kind: type) -> bool:
    """Whether the class has the methods of an optimizer. Instances are not asked: looking may wake them up."""
    if issubclass(kind, Optimizer | nn.Module) or str(kind.__module__).partition(".")[0] in ("torch", "dadt"):
        return False
    methods = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return all(isinstance(methods.get(name), FunctionType) for name in ("step", "zero_grad"))


def _parameters(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf:
            yield value
    elif depth and not isinstance(value, nn.Module | type | FunctionType | str):
        inside = value if isinstance(value, list | tuple | set) else ()
        members = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        for each in (*inside, *(members.values() if isinstance(members, dict) else ())):
            yield from _parameters(each, depth - 1)


def _average_first(kind: type, carriers: dict[int, Carrier]) -> None:
    original: Callable[..., Any] = kind.step  # type: ignore[attr-defined]

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        carrier = carriers.get(id(self))
        if carrier is None:
            return original(self, *args, **kwargs)
        if any(callable(each) for each in (*args, *kwargs.values())):
            raise DadtError(
                f"{type(self).__name__}.step was given a closure: DADT averages before the step of an optimizer that is"
                " none of torch's, so call backward before it, and step() without a closure"
            )
        carrier.run = lambda: original(self, *args, **kwargs)
        return carrier.step()

    kind.step = step  # type: ignore[attr-defined]
