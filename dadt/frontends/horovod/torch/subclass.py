"""More methods for an optimizer that a script has made."""

from __future__ import annotations

import copyreg
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=torch.optim.Optimizer)


class Distributed:
    """An optimizer that trains on all ranks; below it in its class is the script's own."""

    _averaging: Any

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The name by which each parameter travels. Scripts that look for it expect it under this name."""
        names: dict[torch.Tensor, str] = self._averaging.names
        return names

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled or copied is the script's optimizer, on one rank."""
        plain = plain_class(self)
        return copyreg.__newobj__, (plain,), self.__getstate__()  # type: ignore[attr-defined]


def subclassed(optimizer: T, mixin: type, averaging: Any) -> T:
    """Give the optimizer the methods of a mixin, a Distributed, which finds `averaging`. Its class keeps its name."""
    own = type(optimizer)
    optimizer.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    optimizer._averaging = averaging  # type: ignore[attr-defined]
    return optimizer


def plain_class(optimizer: Any) -> type:
    """The class that the script gave it."""
    kind = type(optimizer)
    return kind.__bases__[1] if issubclass(kind, Distributed) else kind


def undo(optimizer: Any) -> None:
    """Make it the script's own again."""
    if isinstance(optimizer, Distributed):
        optimizer._averaging.release()
        optimizer.__class__ = plain_class(optimizer)
