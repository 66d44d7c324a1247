"""Optimizers whose gradients are averaged during backward, and that wait for the averages before they step.

Gradients are exchanged by name, so that parameters without a gradient on some ranks, ranks that have joined, and groups
of parameters work as in Horovod.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dadt.api import lifecycle
from dadt.frontends.horovod.torch import adasum_optimizer, delayed, place
from dadt.frontends.horovod.torch.averaging import Averaging
from dadt.frontends.horovod.torch.compression import Compression, Compressor
from dadt.frontends.horovod.torch.process_sets import ProcessSet, global_process_set
from dadt.frontends.horovod.torch.reduce_op import ReduceOp
from dadt.frontends.horovod.torch.subclass import Distributed, subclassed, undo

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=torch.optim.Optimizer)


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
    `set_backward_passes_per_step`; its new class has the name of the old one.

    Weights and state of the ranks are not synchronized: call `broadcast_parameters` and `broadcast_optimizer_state`.

    named_parameters: a name for each parameter; by default they are numbered. compression: how gradients are
    compressed. backward_passes_per_step: number of backward passes that accumulate before gradients are averaged. op:
    Average, Sum, Min, Max, Product, or Adasum, which combines steps in place of gradients. gradient_predivide_factor:
    divides gradients before their sum, and multiplies after it; for Average only. groups: number of groups of
    parameters, or the groups, whose gradients are sent together; num_groups is its former name. sparse_as_dense:
    whether sparse gradients are sent as dense ones. process_set: the ranks that train together; others train alone.

    With `--algorithm` given, gradients are averaged by that algorithm, for example one step late.

    An optimizer that is distributed already is wrapped again. Raises ValueError for names that are missing or occur
    twice, and for factors and groups that are wrong.
    """
    wanted = ReduceOp(op)
    if gradient_predivide_factor != 1.0 and wanted is not ReduceOp.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    place.size()  # place.size() raises ValueError before `init`
    names = named(optimizer, named_parameters)
    _check_groups(groups)
    undo(optimizer)
    if lifecycle.session().config.algorithm != "sync":
        return delayed.wrap(optimizer, names, wanted, compression, process_set)
    if wanted is ReduceOp.Adasum and place.size() > 1:
        return adasum_optimizer.wrap(optimizer, names, compression, process_set)
    factors = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
    averaging = Averaging(
        optimizer, names, compression, backward_passes_per_step, (wanted, *factors), sparse_as_dense, process_set
    )
    if averaging.parameters:
        averaging.group(groups)
        averaging.listen()
    return subclassed(optimizer, _Synchronous, averaging)


def named(optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the name of each parameter. Raises ValueError if a name is missing or occurs twice."""
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


class _Synchronous(Distributed):
    """Methods of an optimizer whose gradients are averaged before each step."""

    _averaging: Averaging

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes that accumulate before gradients are averaged."""
        return self._averaging.passes

    def synchronize(self) -> None:
        """Wait for the averages of all gradients, for example to clip them. Then step within `skip_synchronize`."""
        if self._averaging.parameters:
            self._averaging.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager in which `step` uses the gradients as they are, for a step after `synchronize`."""
        self._averaging.skips = True
        try:
            yield
        finally:
            self._averaging.skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that accumulate before gradients are averaged."""
        self._averaging.passes = passes
        self._averaging.drop()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients. Raises AssertionError while gradients are being exchanged."""
        if self._averaging.is_busy:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the state, and discard gradients that were already averaged for the current step, so that backward has
        to compute all of them again."""
        self._averaging.drop()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
