"""Horovod Elastic's TorchState: models, optimizers and samplers that can be saved, restored and broadcast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from dadt.frontends.horovod.torch.elastic.object_state import ObjectState
from dadt.frontends.horovod.torch.elastic.sampler import ElasticSampler
from dadt.frontends.horovod.torch.state import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """A state made of a model, an optimizer, samplers and other objects, which are its attributes (`state.model`,
    `state.optimizer` and so on)."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        kept = {name: value for name, value in given.items() if _handles(value)}
        self._kept: dict[str, Any] = {}
        super().__init__(**{n: v for n, v in given.items() if n not in kept and (v is not None or n in kwargs)})
        self.model, self.optimizer = model, optimizer
        for name, value in kept.items():
            setattr(self, name, value)
        self._kept = kept
        self._copies = {name: _copied(value) for name, value in kept.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A new model, optimizer or sampler replaces the former one, and a copy of its state is kept
        for `restore`."""
        if name in self.__dict__.get("_kept", {}):
            self._kept[name] = value
            self._copies[name] = _copied(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of the state of all attributes in memory, which `restore` reads."""
        self._copies = {name: _copied(value) for name, value in self._kept.items()}
        super().save()

    def restore(self) -> None:
        """Return to the state that `save` copied."""
        for name, value in self._kept.items():
            value.load_state_dict(copy.deepcopy(self._copies[name]))
        super().restore()

    def sync(self) -> None:
        """Replace the state on all ranks by rank 0's."""
        for value in self._kept.values():
            _SYNC[_kind(value)](value)
        self._copies = {name: _copied(value) for name, value in self._kept.items()}
        super().sync()

    def reset(self) -> None:
        """Divide the unused samples of the samplers among the current ranks again."""
        for value in self._kept.values():
            if isinstance(value, ElasticSampler):
                value.reset()


_SYNC: dict[type, Callable[[Any], None]] = {
    torch.nn.Module: lambda module: broadcast_parameters(module.state_dict(), 0),
    torch.optim.Optimizer: lambda optimizer: broadcast_optimizer_state(optimizer, 0),
    ElasticSampler: lambda sampler: sampler.load_state_dict(broadcast_object(sampler.state_dict())),
}


def _handles(value: Any) -> bool:
    return isinstance(value, tuple(_SYNC))


def _kind(value: Any) -> type:
    return next(kind for kind in _SYNC if isinstance(value, kind))


def _copied(value: Any) -> Any:
    return copy.deepcopy(value.state_dict())
