"""Ranks take over what rank 0 has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dadt.comm import plain
from dadt.errors import Mismatch
from dadt.train import optimizer_state
from dadt.train.attachment import Attachment
from dadt.train.param_groups import group_values, take_values
from dadt.train.registry import Registry
from dadt.train.trained import listed


def take_rank_0s(runtime: Registry, attachment: Attachment, *, weights: bool) -> None:
    """Take rank 0's param_group values; with `weights` its weights, buffers and optimizer state as well. Raises
    Mismatch where the ranks train different models."""
    optimizer = attachment.optimizer
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    shapes = [tuple(p.shape) for p in parameters]
    first = runtime.group.rank == 0
    state = optimizer_state.encode(optimizer) if first and weights else b""
    mine = (shapes, group_values(optimizer, wait=True), state, optimizer_state.numbers(optimizer))
    theirs = runtime.collect(f"start{attachment.name}", mine)
    for rank, (other, _, _, _) in zip(runtime.members, theirs, strict=True):
        if other != theirs[0][0]:
            raise Mismatch(
                f"rank {rank} trains {_count(other)} and rank {runtime.members[0]} {_count(theirs[0][0])}"
                f"{attachment.name}: every rank must build the same model"
            )
    take_values(optimizer, theirs[0][1])
    # Where they differ, they are a rank's own, as its number is.
    counts = [each[3].items() for each in theirs]
    runtime.own_numbers[optimizer] = {name for each in counts for name, _ in each ^ counts[0]}
    if weights:
        # How far a rank's own weights moved says nothing of rank 0's.
        attachment.prediction.forget()
        for tensors, what in _parts(runtime, attachment):
            runtime.broadcast(tensors, f"{what}{attachment.name}")
        if not first:
            optimizer_state.load(optimizer, theirs[0][2], without=runtime.own_numbers[optimizer])


def catch_up(runtime: Registry, attachment: Attachment, root: int, *, behind: bool) -> None:
    """Take weights, buffers and optimizer state of the group's rank `root`, where this rank is behind: once all has
    come, so that a rank which is lost meanwhile leaves nothing half done. All ranks call it."""
    gives = runtime.group.rank == root
    # Where ranks wait for nobody, the training thread goes on meanwhile.
    reads = gives and not attachment.algorithm.together
    with runtime.reconnection.pause.still(runtime.config.timeout) if reads else nullcontext():
        state = _state(runtime, attachment.optimizer) if gives else b""
        attachment.prediction.forget()
        parts = _parts(runtime, attachment, _common(runtime))
        if reads:
            parts = [([t.clone() for t in tensors], what) for tensors, what in parts]
    state = runtime.tell("state", state)[root]
    came: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensors, what in parts:
        places = tensors if gives else [torch.empty_like(t) for t in tensors]
        runtime.broadcast(places, f"{what} of rank {runtime.members[root]}{attachment.name}", root)
        came += zip(tensors, places, strict=True)
    if behind:
        with torch.no_grad():
            for tensor, value in came:
                tensor.copy_(value)
        optimizer_state.load(attachment.optimizer, state)


def welcome(runtime: Registry) -> bytes:
    """What every optimizer of this rank trains, for a rank that is new."""
    with runtime.reconnection.pause.still(runtime.config.timeout):
        given = [
            [
                *([t.cpu() for t in tensors] for tensors in _all(runtime, a)),
                _state(runtime, a.optimizer),
                group_values(a.optimizer, wait=True),
            ]
            for a in runtime.attachments
        ]
        return plain.encode(given, "what a new rank is given")


def take_welcome(runtime: Registry, attachment: Attachment, given: Sequence[Any]) -> None:
    """Begin with what another rank trains. Raises Mismatch where this one trains another model."""
    weights, buffers, state, values = given
    for mine, theirs in zip(_all(runtime, attachment), (weights, buffers), strict=True):
        if [t.shape for t in mine] != [t.shape for t in theirs[: len(mine)]]:
            raise Mismatch(
                f"rank {runtime.world.rank} trains{attachment.name} another model than the job that it joins: every"
                " rank must build the same model"
            )
        with torch.no_grad():
            for tensor, value in zip(mine, theirs, strict=False):
                tensor.copy_(value)
    take_values(attachment.optimizer, values)
    optimizer_state.load(attachment.optimizer, state)


def _all(runtime: Registry, attachment: Attachment) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights and buffers, those of the optimizer first. A rank that begins may not know of others yet."""
    modules = runtime.root_modules(attachment.optimizer)
    return _parts(runtime, attachment)[0][0], [b.data for m in modules for b in m.buffers()]


def replica(runtime: Registry, attachment: Attachment) -> dict[str, torch.Tensor]:
    """Tensors, by name, that are equal on all ranks after each step: the weights that the optimizer trains and
    untrained ones beside them; with `--verify-every` the optimizer's state as well."""
    optimizer = attachment.optimizer
    others = {id(p) for o in runtime.optimizers if o is not optimizer for p in listed(o)}
    beside = [p for m in runtime.root_modules(optimizer) for p in m.parameters() if id(p) not in others]
    names = runtime.parameter_names()
    common, found = _common(runtime), dict[str, Any]()
    every = dict.fromkeys([*listed(optimizer), *beside])
    added = {id(p) for p in listed(optimizer) if p not in attachment.known}  # and not brought from the first rank yet
    for number, p in enumerate(p for p in every if id(p) not in added):
        name = names.get(id(p)) or f"parameter {number}"
        name = f"{name}, parameter {number}" if name in found else name
        found[name] = common.get(id(p), p.data).to(p.dtype)
        state = getattr(optimizer, "state", {}).get(p) if runtime.config.verify_every else None
        if isinstance(state, dict):
            found.update({f"{key} of {name}": state[key] for key in sorted(state, key=str)})
    if runtime.config.verify_every:
        kept = optimizer_state.tensors(optimizer)
        found.update({f"{path} of {type(optimizer).__name__}": t for path, t in kept.items()})
    tensors = {name: t for name, t in found.items() if isinstance(t, torch.Tensor)}
    return {name: t for name, t in tensors.items() if t.layout == torch.strided and t.device.type != "meta"}


def checksum(tensor: torch.Tensor) -> int:
    """The sum of its bits as integers of 64: fast, and another one where any value has changed."""
    tensor = tensor.detach()
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1).view(torch.uint8)
    if values.storage_offset() % 8:
        values = values.clone()
    whole = len(values) // 8 * 8
    return int(values[:whole].view(torch.int64).sum() + values[whole:].sum(dtype=torch.int64))


def _common(runtime: Registry) -> dict[int, torch.Tensor]:
    return {key: value for a in runtime.attachments for key, value in a.algorithm.common().items()}


def _parts(
    runtime: Registry, attachment: Attachment, common: Mapping[int, torch.Tensor] | None = None
) -> list[tuple[list[torch.Tensor], str]]:
    """Weights and buffers: the true ones. common: what stands for a parameter's weights, by its id."""
    common = common or {}
    for other in runtime.attachments:  # the root may have their parameters, too
        other.prediction.suspend()
    # Also what the optimizer does not train: a frozen part of the model.
    roots = runtime.root_modules(attachment.optimizer)
    parameters = [p for g in attachment.optimizer.param_groups for p in g["params"]]
    every = dict.fromkeys([*parameters, *(p for m in roots for p in m.parameters())])
    # Later on others may have come to differ in shape.
    averaged = [b for _, _, b in attachment.buffers()]
    buffers = averaged if attachment.step else [b for m in roots for b in m.buffers()]
    weights = [common.get(id(p), p.data).to(p.dtype) for p in every]
    return [(weights, "weights"), ([b.data for b in buffers], "buffers")]


def _state(runtime: Registry, optimizer: torch.optim.Optimizer) -> bytes:
    return optimizer_state.encode(optimizer, without=runtime.own_numbers.get(optimizer, ()))


def take_rank_0s_groups(runtime: Registry, attachment: Attachment) -> None:
    """Take rank 0's param_group values, where the ranks set their own in each step."""
    theirs = runtime.collect(f"param_groups{attachment.name}", group_values(attachment.optimizer, wait=True))
    take_values(attachment.optimizer, theirs[0])


def _count(shapes: Sequence[tuple[int, ...]]) -> str:
    return f"{len(shapes)} parameters of {sum(torch.Size(s).numel() for s in shapes):,} values"
