"""Replaces the averages of hybrid sharding (HSDP) between the rows of its mesh: FSDP averages within each row, and DADT
between the rows, as between islands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dadt.train.ranks import Ranks


def shard_size(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module], world_size: int) -> int:
    """Return how many consecutive ranks hold the optimizer's model together; 0 unless FSDP2 shards all of it, on a mesh
    of all ranks whose rows each hold it once."""
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {getattr(p, "device_mesh", None) for p in parameters}
    if len(meshes) != 1 or (mesh := meshes.pop()) is None or mesh.ndim < 2:
        return 0
    rows = mesh.size(0)
    whole = mesh.mesh.flatten().tolist() == list(range(world_size))
    repeated = all(p.placements[0].is_replicate() for p in parameters)
    if not whole or not repeated or rows in (1, world_size):
        return 0
    averaging = {id(p) for group in _groups(modules) for p in _parameters(group)}
    return world_size // rows if averaging.issuperset(map(id, parameters)) else 0


def divide(ranks: Ranks, size: int) -> None:
    """Make each rank exchange only with ranks that hold the same part of the model. Call it before ranks connect. size:
    number of consecutive ranks that hold the model together."""
    ranks.world = replace(ranks.world, shard_size=size)
    ranks.members = ranks.world.equals
    ranks.group = ranks.world.among(ranks.members, 0)


def average_within_rows(modules: Iterable[nn.Module]) -> None:
    """Make FSDP average the gradients of these modules only within the rows of its mesh."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    for group in _groups(modules):
        if not _averages_within_rows(group):
            group.mesh_info = FSDPMeshInfo(group.mesh_info.mesh, shard_mesh_dim=group.mesh_info.shard_mesh_dim)


def averages_some_within_rows(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP averages gradients of this optimizer within rows only, so that DADT has to average between them."""
    ids = {id(p) for group in _groups(modules) if _averages_within_rows(group) for p in _parameters(group)}
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _groups(modules: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's parameter groups on meshes with rows between which FSDP, or DADT in its place, averages."""
    fsdp: list[Any] = [m for m in modules if any(b.__name__ == "FSDPModule" for b in type(m).__mro__)]
    states = [m._get_fsdp_state() for m in fsdp]
    groups: list[Any] = []
    for state in states:
        one = getattr(state, "_fsdp_param_group", None)
        groups += getattr(state, "_fsdp_param_groups", None) or ([] if one is None else [one])
    return [g for g in groups if type(g.mesh_info).__name__ == "HSDPMeshInfo" or _averages_within_rows(g)]


def _averages_within_rows(group: Any) -> bool:
    """Whether FSDP averages this group within rows only, because DADT has told it so: FSDP by itself also averages
    between the rows of a mesh of several dimensions."""
    info = group.mesh_info
    return type(info).__name__ == "FSDPMeshInfo" and info.mesh.ndim > 1 and not getattr(info, "is_spmd_mesh", False)


def _parameters(group: Any) -> list[nn.Parameter]:
    return [each.sharded_param for each in group.fsdp_params]
