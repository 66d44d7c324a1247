"""Optimizers that combine the steps of all ranks by Adasum, instead of averaging gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from dadt.frontends.horovod.torch import operations as hvd
from dadt.frontends.horovod.torch.process_sets import global_process_set
from dadt.frontends.horovod.torch.reduce_op import ReduceOp
from dadt.frontends.horovod.torch.subclass import Distributed, subclassed

if TYPE_CHECKING:
    from torch import Tensor

    from dadt.frontends.horovod.torch.compression import Compressor
    from dadt.frontends.horovod.torch.process_sets import ProcessSet

T = TypeVar("T", bound=torch.optim.Optimizer)


def wrap(optimizer: T, names: dict[Tensor, str], compression: type[Compressor], process_set: ProcessSet) -> T:
    """Make each rank step by its own gradients, and then combine the changes of all ranks' parameters by Adasum. Raises
    NotImplementedError for a process set."""
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    steps = _Steps(names, compression)
    steps.hooks = [optimizer.register_step_pre_hook(steps.before), optimizer.register_step_post_hook(steps.after)]
    return subclassed(optimizer, _Adasum, steps)


class _Steps:
    """Combines what a step has changed in this rank's parameters with the changes of the other ranks."""

    def __init__(self, names: dict[Tensor, str], compression: type[Compressor]) -> None:
        self.names = {p: name for p, name in names.items() if p.requires_grad}
        self._compression = compression
        self._before: list[Tensor] = []
        self._depth = 0
        """Number of nested calls of `step`, since an optimizer's `step` may call the `step` of its base class, and the
        hooks run for both."""
        self.hooks: list[Any] = []

    def release(self) -> None:
        """Remove the hooks, so that the optimizer steps on its own again."""
        while self.hooks:
            self.hooks.pop().remove()

    def before(self, *_: Any) -> None:
        """Step pre-hook: remember the parameters before the step, and set missing gradients to zero."""
        self._depth += 1
        if self._depth > 1:
            return
        for parameter in self.names:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._before = [p.detach().clone() for p in self.names]

    def after(self, *_: Any) -> None:
        """Step post-hook: set the parameters to their values before the step plus the Adasum of all ranks' changes."""
        self._depth -= 1
        if self._depth:
            return
        with torch.no_grad():
            pairs = list(zip(self.names, self._before, strict=True))
            sent = [self._compression.compress(p - start) for p, start in pairs]
            handle = hvd.grouped_allreduce_async_(
                [change for change, _context in sent], name="adasum", op=ReduceOp.Adasum
            )
            combined = hvd.synchronize(handle)
            for (parameter, start), (_sent, context), step in zip(pairs, sent, combined, strict=True):
                parameter.copy_(start.add_(self._compression.decompress(step, context)))
        self._before = []


class _Adasum(Distributed):
    """Methods that `wrap` adds to an optimizer."""

    def synchronize(self) -> None:
        """Does nothing, because each rank uses its own gradients, so there are no averages to wait for."""

    def skip_synchronize(self) -> NoReturn:
        """Raises AssertionError, as in Horovod, because there is no synchronization to skip."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
