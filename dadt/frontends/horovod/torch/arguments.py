"""Parameters of the reductions in Horovod's API. Many functions share these parameters, each in an order of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dadt.frontends.horovod.torch.compression import Compression, Compressor
from dadt.frontends.horovod.torch.process_sets import ProcessSet, global_process_set
from dadt.frontends.horovod.torch.reduce_op import ReduceOp, chosen

R = TypeVar("R")
ALLREDUCE = "average name op prescale_factor postscale_factor process_set"
COMPRESSED_ALLREDUCE = "average name compression op prescale_factor postscale_factor process_set"
REDUCESCATTER = "name op process_set prescale_factor postscale_factor"
COMPRESSED_REDUCESCATTER = "name compression op process_set prescale_factor postscale_factor"


@dataclass(frozen=True, slots=True)
class ReduceArguments:
    """Arguments of a reduction in Horovod's API, except its tensors."""

    average: bool | None = None
    name: str | None = None
    compression: type[Compressor] = Compression.none
    op: int | None = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: ProcessSet = global_process_set

    @property
    def reduction(self) -> ReduceOp:
        """The reduction that `op` or `average` chooses. Raises ValueError if both are set."""
        return chosen(self.op, self.average)


def takes(names: str) -> Callable[[Callable[[Any, ReduceArguments], R]], Callable[..., R]]:
    """Return a decorator that replaces a function's second parameter by those fields of ReduceArguments that `names`
    lists, in this order."""
    known = inspect.signature(ReduceArguments).parameters
    shared = [known[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names.split()]

    def decorate(function: Callable[[Any, ReduceArguments], R]) -> Callable[..., R]:
        tensor = next(iter(inspect.signature(function).parameters.values()))
        signature = inspect.Signature([tensor, *shared])

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}: {error}") from None
            return function(given.pop(tensor.name), ReduceArguments(**given))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
