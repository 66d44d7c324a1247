"""Optimizers whose gradients are averaged while backward computes the others, and are there when the step needs them.

Each gradient is a tensor of its own, by name, so that parameters that got no gradient on some ranks, ranks that have
joined, and groups of parameters work as in Horovod.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dadt.api import lifecycle
from dadt.frontends.horovod.torch import adasum_optimizer, delayed
from dadt.frontends.horovod.torch import operations as hvd
from dadt.frontends.horovod.torch.compression import Compression, Compressor
from dadt.frontends.horovod.torch.process_sets import ProcessSet, global_process_set
from dadt.frontends.horovod.torch.reduce_op import ReduceOp
from dadt.frontends.horovod.torch.subclass import subclassed
from dadt.train.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=torch.optim.Optimizer)
_wrapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_numbers: defaultdict[tuple[Any, ...], Iterator[int]] = defaultdict(itertools.count)
"""Of optimizers of the same process set whose parameters have the same names."""


def DistributedOptimizer(
    optimizer: T,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Train with this optimizer on all ranks. Returns the same object, with `synchronize`, `skip_synchronize` and
    `set_backward_passes_per_step`; its class is one of the same name.

    Weights and state are not made alike: call `broadcast_parameters` and `broadcast_optimizer_state`.

    named_parameters: a name for each parameter; by default they are numbered. compression: of what is sent.
    backward_passes_per_step: how many backwards add up before gradients are averaged. op: Average, Sum, Min, Max,
    Product, or Adasum, which combines steps in place of gradients. gradient_predivide_factor: divides gradients before
    their sum, and multiplies after it; for Average only. groups: how many groups of parameters, or these groups, travel
    together; num_groups is its name of before. sparse_as_dense: sparse gradients travel as dense ones. process_set: the
    ranks that train together; others train alone.

    With `--algorithm` given, gradients are averaged as it says, for example one step late.

    Raises ValueError for names that are missing or occur twice, and for factors and groups that are wrong.
    """
    wanted = ReduceOp(op)
    if gradient_predivide_factor != 1.0 and wanted is not ReduceOp.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if optimizer in _wrapped:
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    names = named(optimizer, named_parameters)
    _check_groups(groups)
    _wrapped.add(optimizer)
    if lifecycle.session().config.algorithm != "sync":
        return delayed.wrap(optimizer, wanted, compression, process_set)
    if wanted is ReduceOp.Adasum and lifecycle.size() > 1:
        return adasum_optimizer.wrap(optimizer, names, compression, process_set)
    factors = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
    averaging = _Averaging(
        optimizer, names, compression, backward_passes_per_step, (wanted, *factors), sparse_as_dense, process_set
    )
    if averaging.parameters:
        averaging.group(groups)
        averaging.listen()
    return subclassed(optimizer, _Synchronous, averaging)


def named(optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the name of each parameter. Raises ValueError if one has none or one that another has, too."""
    all = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"noname.{number}" for number, p in enumerate(all)}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters: give pairs of name and parameter, such as model.named_parameters()")
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters: these names occur more than once: {', '.join(sorted(twice))}")
    names = {parameter: name for name, parameter in pairs}
    lacking = [number for number, p in enumerate(all) if p not in names]
    if lacking:
        raise ValueError(
            f"named_parameters: {len(lacking)} parameters of the optimizer have no name, the first is number"
            f" {lacking[0]}; name all or none"
        )
    return {p: names[p] for p in all}


def _check_groups(groups: int | Sequence[Sequence[Tensor]] | None) -> None:
    if groups is None:
        return
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError("groups: give a number of groups above 0, or lists of parameters")
        return
    if not isinstance(groups, (list, tuple)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    members = [p for group in groups for p in group]
    if any(not isinstance(p, torch.Tensor) for p in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({id(p) for p in members}) < len(members):
        raise ValueError("A parameter can only appear once in groups.")


class _Averaging:
    """The gradients of one optimizer on their way."""

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
        self.passes = passes
        self.skips = False
        """The script has synchronized itself."""
        self.is_synchronized = False
        trains = bool(process_set.included()) and process_set.among.size > 1
        self.parameters = [p for p in names if p.requires_grad] if trains else []
        self._optimizer, self._compression, self._how = weakref.ref(optimizer), compression, how
        self._sparse_as_dense, self._process_set = sparse_as_dense, process_set
        # Optimizers of two models may have the same names.
        number = next(_numbers[(process_set, *names.values())])
        self._names = {p: f"{name} of optimizer {number}" if number else name for p, name in names.items()}
        self._left = dict.fromkeys(self.parameters, passes)
        self._groups: list[list[Tensor]] = [[p] for p in self.parameters]
        self._group_of = {p: number for number, p in enumerate(self.parameters)}
        self._under_way: dict[int, Callable[[], None]] = {}
        self._measure = Measure()

    def group(self, groups: int | Sequence[Sequence[Tensor]] | None) -> None:
        """Have parameters travel together: in so many groups, in their order, or in these."""
        if groups is None:
            return
        if isinstance(groups, int):
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

    def listen(self) -> None:
        """Send each gradient when backward has made it, and have all before the step."""
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
        optimizer = self._optimizer()
        assert optimizer is not None
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._measure.stepped(0.0))
        lifecycle.session().runtime.progress.measures.append(self._measure)

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def renew(self) -> None:
        """Gradients begin anew."""
        self._left = dict.fromkeys(self.parameters, self.passes)

    def synchronize(self) -> None:
        """Have the averages in `.grad`, also of parameters without a gradient: other ranks may have one."""
        for number in range(len(self._groups)):
            if number not in self._under_way:
                self._send(number)
        begun = perf_counter()
        while self._under_way:
            number = next(iter(self._under_way))
            self._under_way.pop(number)()
        waited = perf_counter() - begun
        self._measure.exchanged(waited, waited)
        self.renew()
        self.is_synchronized = True

    def _made(self, parameter: Tensor) -> None:
        number = self._group_of[parameter]
        if number in self._under_way:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase"
                " backward_passes_per_step to accumulate gradients locally."
            )
        self._left[parameter] -= 1
        if all(self._left[p] <= 0 for p in self._groups[number]):
            self._send(number)

    def _send(self, number: int) -> None:
        group = self._groups[number]
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        name = self._names[group[0]]
        if len(group) == 1:
            self._under_way[number] = self._sent(group[0], name)
            return
        sent = [self._compression.compress(self._dense(p)) for p in group]
        op, before, after = self._how
        tensors = [t for t, _ in sent]
        handle = hvd.grouped_allreduce_async_(tensors, None, name, op, before, after, self._process_set)
        self._under_way[number] = lambda: self._receive(group, hvd.synchronize(handle), [c for _, c in sent])

    def _sent(self, parameter: Tensor, name: str) -> Callable[[], None]:
        """What waits for it."""
        assert parameter.grad is not None
        op, before, after = self._how
        if parameter.grad.is_sparse and not self._sparse_as_dense:
            wait = hvd.sparse_allreduce_async(parameter.grad, name, op, self._process_set)
            return lambda: setattr(parameter, "grad", wait())
        tensor, context = self._compression.compress(self._dense(parameter))
        handle = hvd.allreduce_async_(tensor, None, name, op, before, after, self._process_set)
        return lambda: self._receive([parameter], [hvd.synchronize(handle)], [context])

    def _dense(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad

    def _receive(self, group: Sequence[Tensor], averages: Sequence[Tensor], contexts: Sequence[Any]) -> None:
        with torch.no_grad():
            for parameter, average, context in zip(group, averages, contexts, strict=True):
                gradient, result = parameter.grad, self._compression.decompress(average, context)
                assert gradient is not None
                if gradient.is_sparse:
                    parameter.grad = result.to_sparse()
                elif result is not gradient:
                    gradient.copy_(result)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A closure's gradients are averaged at each evaluation."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure):

            def averaged() -> Any:
                loss = closure()
                self._ensure()
                return loss

            if len(args) > 1:
                return (args[0], averaged, *args[2:]), kwargs
            return args, {**kwargs, "closure": averaged}
        self._ensure()
        self.is_synchronized = False
        return None

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


class _Synchronous:
    """What a distributed optimizer has beside its own methods."""

    _averaging: _Averaging

    def synchronize(self) -> None:
        """Wait for the averages of all gradients, for example to clip them. Then step within `skip_synchronize`."""
        if self._averaging.parameters:
            self._averaging.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` takes gradients as they are, after `synchronize`."""
        self._averaging.skips = True
        try:
            yield
        finally:
            self._averaging.skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards add up before gradients are averaged."""
        self._averaging.passes = passes
        self._averaging.renew()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Raises AssertionError while gradients are on their way."""
        if self._averaging.is_busy:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Also begins gradients anew."""
        self._averaging.is_synchronized = False
        self._averaging.renew()
        super().load_state_dict(state_dict)  # type: ignore[misc]
