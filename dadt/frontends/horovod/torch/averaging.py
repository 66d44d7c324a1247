"""Averages the gradients of one optimizer over all ranks, group by group."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from dadt.api import lifecycle
from dadt.frontends.horovod.errors import HorovodInternalError
from dadt.frontends.horovod.torch import operations as hvd
from dadt.train.measure import Measure
from dadt.train.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from dadt.frontends.horovod.torch.compression import Compressor
    from dadt.frontends.horovod.torch.process_sets import ProcessSet
    from dadt.frontends.horovod.torch.reduce_op import ReduceOp

TOGETHER_BYTES = 4 << 20
"""Maximum number of bytes of gradients to send together. Larger groups would delay the last layers' gradients, which
are ready long before those of the first layers."""
_numbers: defaultdict[tuple[Any, ...], Iterator[int]] = defaultdict(itertools.count)
"""Counters that number the optimizers with the same process set and parameter names, so that the names of their tensors
differ."""


class Averaging:
    """Averages gradients in groups of parameters: a group is sent when backward has computed all its gradients, or when
    the step needs them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Tensor, str],
        compression: type[Compressor],
        passes: int,
        how: tuple[ReduceOp, float, float],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """names: the name of each parameter. how: the reduction (op), and the factors before and after it."""
        self.passes = passes
        self.skips = False
        """Whether `step` uses the gradients as they are, because the script itself has called `synchronize` before."""
        self.is_synchronized = False
        trains = bool(process_set.included()) and process_set.among.size > 1
        self.parameters = [p for p in names if p.requires_grad] if trains else []
        self._optimizer, self._compression, self._how = weakref.ref(optimizer), compression, how
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        # Optimizers of two models may have parameters of the same names; a number in the names of their exchanges
        # distinguishes the optimizers.
        number = next(_numbers[(process_set, *names.values())])
        self.names = {p: f"{name} of optimizer {number}" if number else name for p, name in names.items()}
        self._left = dict.fromkeys(self.parameters, passes)
        self._groups: list[list[Tensor]] = []
        self._group_of: dict[Tensor, int] = {}
        self._under_way: dict[int, list[Callable[[], None]]] = {}
        self._depth = 0
        """Number of nested calls of `step`, since an optimizer's `step` may call the `step` of its base class, and the
        hooks run for both."""
        self._measure = Measure(Progress())
        self._hooks: list[Any] = []

    def group(self, groups: int | Sequence[Sequence[Tensor]] | None) -> None:
        """Choose the parameters whose gradients are sent together. groups: the number of groups, which follow the order
        of the parameters, or the groups themselves. None makes groups of a limited size."""
        if groups is None:
            self._groups = self._by_size()
        elif isinstance(groups, int):
            count = min(groups, len(self.parameters))
            sizes = [len(self.parameters) // count + (i < len(self.parameters) % count) for i in range(count)]
            rest = iter(self.parameters)
            self._groups = [[next(rest) for _ in range(size)] for size in sizes]
        else:
            mine = set(self.parameters)
            given = [[p for p in group if p in mine] for group in groups]
            together = {p for group in given for p in group}
            self._groups = [g for g in given if g] + [[p] for p in self.parameters if p not in together]
        self._group_of = {p: number for number, group in enumerate(self._groups) for p in group}

    def _by_size(self) -> list[list[Tensor]]:
        """Return groups of up to TOGETHER_BYTES bytes, beginning with the last parameter, whose gradient is computed
        first."""
        groups: list[list[Tensor]] = []
        room = 0
        for parameter in reversed(self.parameters):
            size = parameter.numel() * parameter.element_size()
            last = groups[-1][-1] if groups else None
            if last is None or room < size or (last.dtype, last.device) != (parameter.dtype, parameter.device):
                groups.append([])
                room = TOGETHER_BYTES
            groups[-1].append(parameter)
            room -= size
        return groups

    def listen(self) -> None:
        """Register hooks that send gradients when backward has computed them, and wait for all averages before the
        step. Hooks refer to this object weakly, so that it is freed with its optimizer."""
        made = weakref.WeakMethod(self._made)

        def hook(parameter: Tensor) -> None:
            if (call := made()) is not None:
                call(parameter)

        optimizer = self._optimizer()
        assert optimizer is not None
        for parameter in self.parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        first = optimizer.register_step_pre_hook(self._before_step)
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(first.id, last=False)  # run first, so that the other hooks of the step see averaged gradients
        self._hooks += [first, optimizer.register_step_post_hook(self._after_step)]
        lifecycle.session().runtime.ranks.progress.measures.append(self._measure)
        weakref.finalize(self, _remove, self._hooks)

    def release(self) -> None:
        """Wait for pending exchanges and remove the hooks, so that the optimizer steps on its own again."""
        self.drop()
        _remove(self._hooks)

    @property
    def is_busy(self) -> bool:
        """Whether gradients are being exchanged."""
        return bool(self._under_way)

    def drop(self) -> None:
        """Discard the averages of the current step: wait for pending exchanges, and expect every parameter's gradient
        from backward again."""
        for wait in [wait for waits in self._under_way.values() for wait in waits]:
            with suppress(HorovodInternalError):
                wait()
        self._under_way.clear()
        self.is_synchronized = self.skips = False
        self._left = dict.fromkeys(self.parameters, self.passes)

    def synchronize(self) -> None:
        """Wait until `.grad` of every parameter is the average. Parameters without a gradient take part, too, since
        other ranks may have a gradient for them."""
        begun = perf_counter()
        try:
            for number in range(len(self._groups)):
                if number not in self._under_way:
                    self._send(number)
            for wait in [wait for waits in self._under_way.values() for wait in waits]:
                wait()
        finally:
            self._under_way.clear()
            self._left = dict.fromkeys(self.parameters, self.passes)
        waited = perf_counter() - begun
        self._measure.exchanged(waited, waited)
        self.is_synchronized = True

    def _made(self, parameter: Tensor) -> None:
        self._depth = 0  # the count is above 0 here if an earlier step has raised an exception
        number = self._group_of[parameter]
        if number in self._under_way or self._left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase"
                " backward_passes_per_step to accumulate gradients locally."
            )
        self._left[parameter] -= 1
        if all(self._left[p] <= 0 for p in self._groups[number]):
            self._send(number)

    def _send(self, number: int) -> None:
        group = self._groups[number]
        waits = self._under_way[number] = []
        kinds: defaultdict[torch.dtype, list[tuple[Tensor, Tensor, Any]]] = defaultdict(list)
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse and not self._sparse_as_dense:
                waits.append(self._send_sparse(parameter))
                continue
            dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            tensor, context = self._compression.compress(dense)
            kinds[tensor.dtype].append((parameter, tensor, context))
        waits += [self._send_dense(together) for together in kinds.values()]

    def _send_sparse(self, parameter: Tensor) -> Callable[[], None]:
        assert parameter.grad is not None
        wait = hvd.sparse_allreduce_async(parameter.grad, self.names[parameter], self._how[0], self._process_set)
        return lambda: setattr(parameter, "grad", wait())

    def _send_dense(self, together: Sequence[tuple[Tensor, Tensor, Any]]) -> Callable[[], None]:
        op, *factors = self._how
        name = f"{self.names[together[0][0]]}, {len(together)} in all"
        tensors = [tensor for _, tensor, _ in together]
        handle = hvd.allreduce_together_(tensors, name, op, (factors[0], factors[1]), self._process_set)

        def wait() -> None:
            averages = hvd.synchronize(handle)
            with torch.no_grad():
                for (parameter, _, context), average in zip(together, averages, strict=True):
                    self._receive(parameter, self._compression.decompress(average, context))

        return wait

    def _receive(self, parameter: Tensor, average: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = average
        elif gradient.is_sparse:
            parameter.grad = average.to_sparse()
        elif average is not gradient:
            gradient.copy_(average)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Step pre-hook that averages the gradients. If the step has a closure, they are averaged at each evaluation of
        the closure instead."""
        self._depth += 1
        if self._depth > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure):

            def averaged() -> Any:
                loss = closure()
                self._ensure()
                self.is_synchronized = False
                return loss

            if len(args) > 1:
                return (args[0], averaged, *args[2:]), kwargs
            return args, {**kwargs, "closure": averaged}
        self._ensure()
        return None

    def _after_step(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self.is_synchronized = False
            self._measure.stepped()

    def _ensure(self) -> None:
        if self.skips:
            return
        if self.is_synchronized and not self.is_busy:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize():"
                " gradients are averaged twice. Write `with optimizer.skip_synchronize(): optimizer.step()`.",
                stacklevel=4,
            )
        self.synchronize()


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
