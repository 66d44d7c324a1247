"""Steps that are combined by Adasum, in place of gradients that are averaged."""

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
    """Each rank steps by its own gradients; all take the Adasum of what these steps have changed. Raises
    NotImplementedError for a process set."""
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    steps = _Steps(names, compression)
    steps.hooks = [optimizer.register_step_pre_hook(steps.before), optimizer.register_step_post_hook(steps.after)]
    return subclassed(optimizer, _Adasum, steps)


class _Steps:
    """What one step has changed on this rank."""

    def __init__(self, names: dict[Tensor, str], compression: type[Compressor]) -> None:
        self.names = {p: name for p, name in names.items() if p.requires_grad}
        self._compression = compression
        self._before: list[Tensor] = []
        self._depth = 0
        """Steps under way: that of a class may call that of the class below it."""
        self.hooks: list[Any] = []

    def release(self) -> None:
        """The optimizer is the script's own again."""
        while self.hooks:
            self.hooks.pop().remove()

    def before(self, *_: Any) -> None:
        """The optimizer is about to step: keep what the parameters are before it."""
        self._depth += 1
        if self._depth > 1:
            return
        for parameter in self.names:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._before = [p.detach().clone() for p in self.names]

    def after(self, *_: Any) -> None:
        """The optimizer has stepped: the parameters get what they were before, plus the Adasum of all ranks'
        changes."""
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
    """The methods that `wrap` adds to an optimizer."""

    def synchronize(self) -> None:
        """Gradients stay each rank's own, so there is nothing to wait for."""

    def skip_synchronize(self) -> NoReturn:
        """Raises AssertionError, as in Horovod: there is no synchronization to skip."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up until `step` in any case."""
