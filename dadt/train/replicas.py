"""Copies weights, buffers and optimizer state between ranks, so that every optimizer trains equal values on all
ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dadt.comm import plain
from dadt.comm.shards import local, place
from dadt.errors import Mismatch
from dadt.train import optimizer_state
from dadt.train.algorithm import Attached
from dadt.train.optimizers import Optimizers
from dadt.train.param_groups import group_values, take_values
from dadt.train.ranks import Ranks
from dadt.train.trained import listed


class Replicas:
    """Copies what optimizers train between ranks. Every rank calls the methods that exchange data in the same order, on
    the script's training thread."""

    def __init__(
        self,
        ranks: Ranks,
        optimizers: Optimizers,
        attachments: Iterable[Attached],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """aside: returns a context in which DADT itself, not the script, reads and sets optimizers' states."""
        self._ranks, self._optimizers, self._attachments = ranks, optimizers, attachments
        self.aside = aside
        self.given: list[Any] = []
        """On a rank that joins a running job: the received weights, buffers and optimizer state, by attachment's index.
        """
        self._own_numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[str]] = weakref.WeakKeyDictionary()
        """For each optimizer, paths of numbers in its attributes that differ between ranks, such as a rank's own
        number."""

    def take_first(self, attachment: Attached, *, weights: bool) -> None:
        """Set param_group values to the first rank's; with `weights` also weights, buffers and optimizer state. Raises
        Mismatch if the ranks train different models."""
        with self.aside():
            self._take_first(attachment, weights=weights)

    def _take_first(self, attachment: Attached, *, weights: bool) -> None:
        optimizer = attachment.optimizer
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        shapes = [(tuple(p.shape), place(p)) for p in parameters]
        first = self._ranks.group.rank == 0
        state = optimizer_state.encode(optimizer) if first and weights else b""
        mine = (shapes, group_values(optimizer, wait=True), state, optimizer_state.numbers(optimizer))
        theirs = self._ranks.collect(f"start{attachment.name}", mine)
        for rank, (other, _, _, _) in zip(self._ranks.members, theirs, strict=True):
            if other != theirs[0][0]:
                raise Mismatch(
                    f"rank {rank} trains {_count(other)} and rank {self._ranks.members[0]} {_count(theirs[0][0])}"
                    f"{attachment.name}: every rank must build the same model"
                )
        take_values(optimizer, theirs[0][1])
        # Numbers that differ between ranks are specific to each rank, such as its own rank number, and are not copied.
        counts = [each[3].items() for each in theirs]
        self._own_numbers[optimizer] = {name for each in counts for name, _ in each ^ counts[0]}
        if weights:
            # The way that this rank's old weights moved does not predict rank 0's weights.
            attachment.prediction.forget()
            for tensors, what in self._parts(attachment):
                self._ranks.broadcast(tensors, f"{what}{attachment.name}")
            if not first:
                optimizer_state.load(optimizer, theirs[0][2], without=self._own_numbers[optimizer])

    def take_first_groups(self, attachment: Attached) -> None:
        """Set param_group values to the first rank's, if the script sets them on each rank in each step."""
        theirs = self._ranks.collect(f"param_groups{attachment.name}", group_values(attachment.optimizer, wait=True))
        take_values(attachment.optimizer, theirs[0])

    def catch_up(self, attachment: Attached, root: int, *, behind: bool) -> None:
        """Copy weights, buffers and optimizer state from the group's rank `root` if this rank is behind; nothing is
        changed before all have arrived, in case a rank is lost meanwhile. All ranks call this method."""
        gives = self._ranks.group.rank == root
        # If ranks do not wait for each other, the training thread continues meanwhile, so values are copied during a
        # pause.
        reads = gives and not attachment.algorithm.together
        with self._ranks.reconnection.pause.still(self._ranks.config.timeout) if reads else nullcontext():
            state = self._state(attachment.optimizer) if gives else b""
            attachment.prediction.forget()
            parts = self._parts(attachment, self._common())
            if reads:
                parts = [([t.clone() for t in tensors], what) for tensors, what in parts]
        state = self._ranks.tell("state", state)[root]
        came: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensors, what in parts:
            places = tensors if gives else [torch.empty_like(t) for t in tensors]
            self._ranks.broadcast(places, f"{what} of rank {self._ranks.members[root]}{attachment.name}", root)
            came += zip(tensors, places, strict=True)
        if behind:
            with torch.no_grad():
                for tensor, value in came:
                    tensor.copy_(value)
            optimizer_state.load(attachment.optimizer, state)

    def give(self) -> bytes:
        """Return weights, buffers, optimizer state and param_group values of all optimizers, encoded for a new rank."""
        with self._ranks.reconnection.pause.still(self._ranks.config.timeout):
            given = [
                [
                    *([t.cpu() for t in tensors] for tensors in self._all(a)),
                    self._state(a.optimizer),
                    group_values(a.optimizer, wait=True),
                ]
                for a in self._attachments
            ]
            return plain.encode(given, "what a new rank is given")

    def take_given(self, attachment: Attached) -> None:
        """Start from the state that another rank has sent. Raises Mismatch if this rank trains another model."""
        weights, buffers, state, values = self.given[attachment.index]
        for mine, theirs in zip(self._all(attachment), (weights, buffers), strict=True):
            if [t.shape for t in mine] != [t.shape for t in theirs[: len(mine)]]:
                raise Mismatch(
                    f"rank {self._ranks.world.rank} trains{attachment.name} another model than the job that it joins:"
                    " every rank must build the same model"
                )
            with torch.no_grad():
                for tensor, value in zip(mine, theirs, strict=False):
                    tensor.copy_(value)
        take_values(attachment.optimizer, values)
        optimizer_state.load(attachment.optimizer, state)

    def tensors(self, attachment: Attached) -> dict[str, torch.Tensor]:
        """Return, by name, the tensors that are equal on all ranks after each step: weights that the optimizer trains,
        and untrained weights of the same modules; with `--verify-every` also the optimizer's state."""
        optimizer = attachment.optimizer
        others = {id(p) for o in self._optimizers if o is not optimizer for p in listed(o)}
        beside = [p for m in self._optimizers.root_modules(optimizer) for p in m.parameters() if id(p) not in others]
        names = self._optimizers.parameter_names()
        common, found = self._common(), dict[str, Any]()
        every = dict.fromkeys([*listed(optimizer), *beside])
        # Parameters that the script has added, whose values were not copied from the first rank yet.
        added = {id(p) for p in listed(optimizer) if p not in attachment.known}
        for number, p in enumerate(p for p in every if id(p) not in added):
            name = names.get(id(p)) or f"parameter {number}"
            name = f"{name}, parameter {number}" if name in found else name
            found[name] = common.get(id(p), local(p.data)).to(p.dtype)
            state = getattr(optimizer, "state", {}).get(p) if self._ranks.config.verify_every else None
            if isinstance(state, dict):
                found.update({f"{key} of {name}": state[key] for key in sorted(state, key=str)})
        if self._ranks.config.verify_every:
            kept = optimizer_state.tensors(optimizer)
            found.update({f"{path} of {type(optimizer).__name__}": t for path, t in kept.items()})
        tensors = {name: local(t) for name, t in found.items() if isinstance(t, torch.Tensor)}
        return {name: t for name, t in tensors.items() if t.layout == torch.strided and t.device.type != "meta"}

    def _all(self, attachment: Attached) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return weights and buffers, the optimizer's own weights first. A rank that has just begun may not know all
        modules' tensors yet."""
        modules = self._optimizers.root_modules(attachment.optimizer)
        return self._parts(attachment)[0][0], [local(b.data) for m in modules for b in m.buffers()]

    def _parts(
        self, attachment: Attached, common: Mapping[int, torch.Tensor] | None = None
    ) -> list[tuple[list[torch.Tensor], str]]:
        """Return the true (not predicted) weights, and the buffers. common: tensors to use in place of parameters'
        weights, by the parameter's id."""
        common = common or {}
        for other in self._attachments:  # root modules may contain other optimizers' parameters, too
            other.prediction.suspend()
        # The root modules also contain parameters that the optimizer does not train, such as a frozen part of the
        # model.
        roots = self._optimizers.root_modules(attachment.optimizer)
        parameters = [p for g in attachment.optimizer.param_groups for p in g["params"]]
        every = dict.fromkeys([*parameters, *(p for m in roots for p in m.parameters())])
        # After the first step, buffers that are not averaged may differ in shape between ranks, so they are left out.
        averaged = [b for _, _, b in attachment.buffers()]
        buffers = averaged if attachment.step else [b for m in roots for b in m.buffers()]
        weights = [common.get(id(p), local(p.data)).to(p.dtype) for p in every]
        return [(weights, "weights"), ([local(b.data) for b in buffers], "buffers")]

    def _common(self) -> dict[int, torch.Tensor]:
        return {key: value for a in self._attachments for key, value in a.algorithm.common().items()}

    def _state(self, optimizer: torch.optim.Optimizer) -> bytes:
        return optimizer_state.encode(optimizer, without=self._own_numbers.get(optimizer, ()))


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of the tensor's bytes as 64-bit integers: fast, and different after a change of any single
    value."""
    tensor = local(tensor).detach()
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1).view(torch.uint8)
    if values.storage_offset() % 8:
        values = values.clone()
    whole = len(values) // 8 * 8
    return int(values[:whole].view(torch.int64).sum() + values[whole:].sum(dtype=torch.int64))


def _count(shapes: Sequence[tuple[tuple[int, ...], str]]) -> str:
    parts = sorted({where for _, where in shapes if where})
    sharded = f", sharded {', '.join(parts)}" if parts else ""
    return f"{len(shapes)} parameters of {sum(torch.Size(s).numel() for s, _ in shapes):,} values{sharded}"
