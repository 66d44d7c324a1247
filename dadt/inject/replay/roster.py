"""Numbers the objects whose state a snapshot contains in the order in which the script has created them, by which
another run of the script finds the same objects."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from dadt.inject.patch import replaces
from dadt.train.frozen import quantization


class Roster:
    """The modules, schedulers and gradient scalers of this process, numbered in the order of their creation."""

    def __init__(self) -> None:
        self._modules_built = 0
        # Keyed by identity, because a module's own `__hash__` may use attributes that are not set yet.
        self._modules: MutableMapping[nn.Module, int] = WeakIdKeyDictionary()
        self._schedulers: list[weakref.ref[Any]] = []
        self._scalers: list[weakref.ref[Any]] = []

    def install(self) -> None:
        """Number all modules, schedulers and scalers that are built after this call, including copies of modules."""
        self._number("__init__")
        self._number("__setstate__")
        _list(LRScheduler, self._schedulers)
        _list(GradScaler, self._scalers)

    def schedulers(self) -> dict[int, Any]:
        """Return the schedulers that still exist, by their numbers in the order of creation."""
        return _alive(self._schedulers)

    def scalers(self) -> dict[int, Any]:
        return _alive(self._scalers)

    def was_built(self, name: str) -> bool:
        """Return whether the module of the tensor with this name was built, even if it no longer exists."""
        return int(name.partition(".")[0]) < self._modules_built

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers of all modules that exist, and the scales of quantized parameters, with
        names that are the same in each run of the script."""
        given: set[int] = set()
        for number, module in self._numbered():
            own = itertools.chain(module._parameters.items(), module._buffers.items())
            for name, tensor in own if "_parameters" in module.__dict__ else ():
                if tensor is not None and id(tensor) not in given:
                    given.add(id(tensor))
                    yield f"{number}.{name}", tensor
                    for place, scales in enumerate(quantization([tensor])):
                        yield f"{number}.{name}.{place}", scales

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of all modules that exist, with the same names as in `tensors`. Unlike parameters, buffers
        may differ between ranks."""
        for number, module in self._numbered():
            for name, tensor in module._buffers.items() if "_buffers" in module.__dict__ else ():
                if tensor is not None:
                    yield f"{number}.{name}", tensor

    @property
    def built(self) -> int:
        """Total number of modules, schedulers and scalers built so far."""
        return self._modules_built + len(self._schedulers) + len(self._scalers)

    def number(self, module: nn.Module) -> int | None:
        return self._modules.get(module)

    def module(self, number: int) -> nn.Module | None:
        return next((each for each, found in self._modules.items() if found == number), None)

    def attributes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors in plain attributes of modules, such as those with which Lightning sums up logged values."""
        for number, module in self._numbered():
            for name, value in module.__dict__.items():
                if isinstance(value, torch.Tensor):
                    yield f"{number}.{name}", value

    def counts(self) -> dict[str, Any]:
        """Return plain values in attributes of modules, such as a number of calls, which would be wrong after a replay,
        because it skips most forwards."""
        return {
            f"{number}.{name}": value
            for number, module in self._numbered()
            for name, value in module.__dict__.items()
            if type(value) in (bool, int, float, str)
        }

    def restore(self, counts: Mapping[str, Any]) -> None:
        for number, module in self._numbered():
            for name in list(module.__dict__):
                if type(value := counts.get(f"{number}.{name}")) is type(module.__dict__[name]):
                    module.__dict__[name] = value

    def _numbered(self) -> list[tuple[int, nn.Module]]:
        return sorted(((number, module) for module, number in self._modules.items()), key=itemgetter(0))

    def _number(self, name: str) -> None:
        @replaces(name, nn.Module)
        def build(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            build.__wrapped__(module, *args, **kwargs)
            if module not in self._modules:
                self._modules[module] = self._modules_built
                self._modules_built += 1


def _list(kind: type, built: list[weakref.ref[Any]]) -> None:
    @replaces("__init__", kind)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append(weakref.ref(self))
        init.__wrapped__(self, *args, **kwargs)


def _alive(built: Sequence[weakref.ref[Any]]) -> dict[int, Any]:
    return {number: found for number, each in enumerate(built) if (found := each()) is not None}
