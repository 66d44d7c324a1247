"""Handles DistributedDataParallel and similar wrappers that a script has put around the modules its optimizers
train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dadt.errors import DadtError, Sharded
from dadt.inject import hybrid
from dadt.train.runtime import Runtime

_SHARDING = ("FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel")
"""Names of classes that shard parameters or average gradients themselves. DistributedDataParallel here means classes of
this name in other libraries, since torch's own is handled separately."""
_QUIET = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    # If this were not set, DDP with a static graph would average at the end of its first backward, regardless of
    # require_backward_grad_sync.
    "_static_graph_delay_allreduce_enqueued": True,
}


class Wrappers:
    """Decides for each DDP and each optimizer of a script that averages gradients by itself whether DADT averages in
    its place or leaves it alone.

    Where DADT averages in place of a DDP, the DDP's forwards run as within its own `no_sync()`: backward leaves the
    rank's own gradients, and DADT averages them before they are used, as for any other model. A communication hook
    would instead copy all gradients into DDP's buckets and back, and would keep DDP's broadcast of buffers and its
    agreement on unused parameters, for which ranks wait in each step. If DADT does not see a forward, DDP averages its
    gradients and DADT averages them once more, to the same values.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ranks = runtime.ranks
        self._optimizers = runtime.optimizers
        self._undecided: weakref.WeakSet[DDP] = weakref.WeakSet()
        self._quiet: weakref.WeakSet[DDP] = weakref.WeakSet()
        """The DistributedDataParallel wrappers in whose place DADT averages gradients."""
        self._hybrid: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers of models with hybrid sharding for which DADT averages in FSDP's place."""

    def notice(self, modules: Iterable[nn.Module]) -> None:
        self._undecided.update(m for m in modules if isinstance(m, DDP) and m not in self._quiet)

    def leaves_alone(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> bool:
        """Return whether DADT leaves the optimizer alone, because of its class or of the modules that contain its
        parameters."""
        # A ZeroRedundancyOptimizer contains a plain optimizer for this rank's share of its parameters, and DADT leaves
        # both alone.
        if any(_is_zero(o) and _ids(o) & _ids(optimizer) for o in [optimizer, *self._optimizers.left_alone]):
            self._leave(optimizer, "ZeroRedundancyOptimizer shares out its state among the ranks by itself")
        elif not self._ranks.world.island_size and self._takes_over(optimizer, modules):
            pass
        elif self._ranks.world.shard_size:
            if hybrid.averages_some_within_rows(optimizer, modules):
                raise DadtError(
                    f"{type(optimizer).__name__} trains parameters of a model whose rows DADT averages, and others:"
                    " give these an optimizer of their own, or run with --inject none"
                )
            self._leave(optimizer, "the script shards other models, between whose parts DADT averages")
        elif not self._ranks.world.island_size and (sharding := list(filter(_is_sharding, modules))):
            if self._ranks.world.may_divide and not any(map(_spans_hosts, sharding)):
                raise Sharded("the script shards its model over all hosts: the job begins again with --island host")
            reason = (
                "its parameters belong to FSDP or the like, which averages them by itself (--island host: on each host)"
            )
            self._leave(optimizer, reason)
        return optimizer in self._optimizers.left_alone

    def _takes_over(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> bool:
        """Return whether DADT averages this optimizer's gradients between the rows of a mesh, in place of FSDP2's
        hybrid sharding, which stores the whole model in each row."""
        if optimizer in self._hybrid:
            return True
        world, others = self._ranks.world, [o for o in self._optimizers if o is not optimizer]
        size = hybrid.shard_size(optimizer, modules, world.world_size)
        if size == 0 or size != (world.shard_size or size):
            return False
        if not world.shard_size:
            if self._ranks.connection is not None or others:
                return False
            hybrid.divide(self._ranks, size)
            rows = world.world_size // size
            self._ranks.say(
                f"FSDP on a mesh of {rows} x {size}: its gradients are averaged between the {rows} rows by"
                f" --algorithm {self._ranks.config.algorithm} in its place"
            )
        hybrid.average_within_rows(modules)
        self._hybrid.add(optimizer)
        return True

    def decide(self) -> None:
        """Decide, before optimizers are attached, whether DADT or DDP averages the gradients of each DDP with trained
        parameters."""
        if self._runtime.script.explicit:
            return
        for ddp in list(self._undecided):
            ids = {id(p) for p in ddp.parameters()}
            optimizers = [o for o in [*self._optimizers, *self._optimizers.left_alone] if _ids(o) & ids]
            if not optimizers:
                continue
            self._undecided.discard(ddp)
            outlived_by_group(ddp)
            reason = self._reason(ddp, optimizers)
            for optimizer in optimizers if reason else []:
                if self._runtime.attachments.of(optimizer) is None:
                    self._leave(optimizer, f"DistributedDataParallel averages its gradients by itself, {reason}")
            if not reason and self._ranks.world.island_size:
                self._ranks.say("DistributedDataParallel averages within each island, and DADT between them")
            elif not reason:
                self._quiet.add(ddp)
                self._ranks.say(
                    "DistributedDataParallel: its gradients and buffers are averaged by"
                    f" --algorithm {self._ranks.config.algorithm} in its place"
                )

    def _reason(self, ddp: DDP, optimizers: list[torch.optim.Optimizer]) -> str:
        """Return why the DDP continues to average by itself; an empty string if DADT averages in its place."""
        size, world = ddp.process_group.size(), self._ranks.world
        if size != (world.island_size or world.world_size):
            return f"over {size} of {world.world_size} workers"
        if any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()):
            return "for optimizers that step within the backward"
        if ddp._delay_all_reduce_params or "comm_hook" in ddp._get_ddp_logging_data():  # type: ignore[no-untyped-call]
            return "with a communication hook of the script's"
        if ddp._join_config.enable:
            return "with uneven inputs (join)"
        if any(o in self._optimizers.left_alone for o in optimizers):
            return "for an optimizer that is left alone"
        return ""

    def _leave(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        if optimizer not in self._optimizers.left_alone:
            self._optimizers.leave_alone(optimizer, reason)

    def unanswered(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, a forward that no backward follows, wrapped so that no DDP prepares to average. A DDP would
        otherwise wait for this backward, and average the gradients of the next one."""

        def quiet(*args: Any, **kwargs: Any) -> Any:
            with self.quiet(undecided=True):
                return call(*args, **kwargs)

        return quiet

    @contextmanager
    def quiet(self, *, undecided: bool = False) -> Iterator[None]:
        """A context for a forward, in which the DDPs in whose place DADT averages do not average. Outside of this
        context, the DDPs' attributes, and so their pickles, are unchanged. undecided: include DDPs for which it is not
        decided yet who averages.
        """
        before: list[tuple[DDP, dict[str, Any]]] = []
        for ddp in self._quiet:
            self._check(ddp)
        for ddp in [*self._quiet, *(self._undecided if undecided else ())]:
            before.append((ddp, {name: ddp.__dict__[name] for name in _QUIET if name in ddp.__dict__}))
        for ddp, values in before:
            ddp.__dict__.update({name: _QUIET[name] for name in values})
        try:
            yield
        finally:
            for ddp, values in before:
                ddp.__dict__.update(values)

    def _check(self, ddp: DDP) -> None:
        """Raise DadtError if the script has registered a communication hook in a DDP, or called its join() for uneven
        inputs, after DADT began to average in its place."""
        late = "join()" if ddp._join_config.enable else "register_comm_hook()" if ddp._comm_hooks else ""
        if late:
            raise DadtError(
                f"{late} of DistributedDataParallel after its first training forward, since which DADT averages in its"
                " place: call it before that, and the model is left alone, or run with --inject none"
            )


def outlived_by_group(ddp: DDP) -> None:
    """Keep the DDP's process group alive until the DDP's C++ objects are destroyed.

    If one of these objects held the last reference to the group, torch would wait for Gloo's threads while it holds the
    GIL, which a thread that frees an operation needs. A script that ends its process group before its model could then
    hang.
    """
    for part in (ddp.reducer, ddp.logger):
        weakref.finalize(part, _release, ddp.process_group).atexit = False


def _release(group: object) -> None:
    """Does nothing. As a finalizer, the function keeps its argument, the process group, alive."""


def _is_sharding(module: nn.Module) -> bool:
    if any(type(p).__name__ == "DTensor" for p in module._parameters.values()):
        return True
    return not isinstance(module, DDP) and any(base.__name__ in _SHARDING for base in type(module).__mro__)


def _spans_hosts(module: nn.Module) -> bool:
    """Return whether the script shards this module on a mesh with two or more dimensions of its own, one of which may
    be between hosts."""
    meshes = [getattr(p, "device_mesh", None) for p in module._parameters.values()]
    return any(mesh is not None and mesh.ndim > 1 for mesh in meshes)


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
