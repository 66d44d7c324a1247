"""Ranks take over what rank 0 has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dadt.comm import plain
from dadt.errors import Mismatch
from dadt.train.attachment import Attachment
from dadt.train.param_groups import group_values, take_values
from dadt.train.registry import Registry


def take_rank_0s(runtime: Registry, attachment: Attachment, *, weights: bool) -> None:
    """param_group values; with `weights` weights, buffers and optimizer state as well. Raises Mismatch where the ranks
    train different models."""
    optimizer = attachment.optimizer
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    shapes = [tuple(p.shape) for p in parameters]
    state = b""
    if runtime.world.rank == 0 and weights and optimizer.state:
        state = plain.encode(optimizer.state_dict()["state"], f"the state of {type(optimizer).__name__}")
    mine = (shapes, group_values(optimizer, wait=True), state)
    theirs = runtime.collect(f"start{attachment.name}", mine)
    for rank, (other, _, _) in enumerate(theirs):
        if other != theirs[0][0]:
            raise Mismatch(
                f"rank {rank} trains {_count(other)} and rank 0 {_count(theirs[0][0])}{attachment.name}:"
                " every rank must build the same model"
            )
    take_values(optimizer, theirs[0][1])
    if weights:
        # How far a rank's own weights moved says nothing of rank 0's.
        attachment.prediction.forget()
        for other in runtime.attachments:  # the root may have their parameters, too
            other.prediction.suspend()
        # Also what the optimizer does not train: a frozen part of the model.
        roots = runtime.root_modules(optimizer)
        every = dict.fromkeys([*parameters, *(p for m in roots for p in m.parameters())])
        runtime.broadcast([p.data for p in every], f"weights{attachment.name}")
        # Later on others may have come to differ in shape.
        averaged = [b for _, _, b in attachment.buffers()]
        buffers = averaged if attachment.step else [b for m in roots for b in m.buffers()]
        runtime.broadcast([b.data for b in buffers], f"buffers{attachment.name}")
        if runtime.world.rank != 0 and theirs[0][2]:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": plain.decode(theirs[0][2]), "param_groups": groups})
        elif runtime.world.rank != 0:
            optimizer.state.clear()


def take_rank_0s_groups(runtime: Registry, attachment: Attachment) -> None:
    """param_group values, where the ranks set their own in each step."""
    theirs = runtime.collect(f"param_groups{attachment.name}", group_values(attachment.optimizer, wait=True))
    take_values(attachment.optimizer, theirs[0])


def _count(shapes: Sequence[tuple[int, ...]]) -> str:
    return f"{len(shapes)} parameters of {sum(torch.Size(s).numel() for s in shapes):,} values"
