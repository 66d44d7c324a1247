"""Adds methods to an optimizer object that a script has created."""

from __future__ import annotations

import copyreg
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=torch.optim.Optimizer)


class Distributed:
    """Base of the mixins whose methods are added to a script's optimizer, so that the optimizer trains on all ranks.
    The optimizer's new class derives from a mixin and from its old class."""

    _averaging: Any

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name under which each parameter's gradient is exchanged. Some scripts read this attribute of Horovod's
        optimizers."""
        names: dict[torch.Tensor, str] = self._averaging.names
        return names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing, because gradients accumulate until `step` over any number of backward passes anyway."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy the optimizer with the class that the script chose, so that the copy trains on one rank."""
        plain = plain_class(self)
        return copyreg.__newobj__, (plain,), self.__getstate__()  # type: ignore[attr-defined]


def subclassed(optimizer: T, mixin: type, averaging: Any) -> T:
    """Give the optimizer the methods of `mixin`, a subclass of Distributed, which uses `averaging`. The optimizer's
    class keeps its name."""
    own = type(optimizer)
    optimizer.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    optimizer._averaging = averaging  # type: ignore[attr-defined]
    return optimizer


def plain_class(optimizer: Any) -> type:
    """Return the optimizer's class without the methods that `subclassed` has added."""
    kind = type(optimizer)
    return kind.__bases__[1] if issubclass(kind, Distributed) else kind


def undo(optimizer: Any) -> None:
    """Undo `subclassed`: the optimizer gets its former class, and steps on its own again."""
    if isinstance(optimizer, Distributed):
        optimizer._averaging.release()
        optimizer.__class__ = plain_class(optimizer)
