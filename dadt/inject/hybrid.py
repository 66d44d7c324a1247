"""Replaces a part of hybrid sharding (HSDP), in which each row of a mesh of ranks stores the model once: FSDP averages
gradients only within each row, and DADT averages between the rows, as between islands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dadt.train.ranks import Ranks


def shard_size(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module], world_size: int) -> int:
    """Return how many consecutive ranks store the optimizer's model together (a row of the mesh). Returns 0 unless
    FSDP2 shards all of the model, on a mesh of all ranks in which each row stores it once."""
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
    """Make each rank exchange only with the ranks that store the same part of the model. Call this before ranks
    connect. size: number of consecutive ranks that store the model together."""
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
    """Return whether FSDP averages gradients of this optimizer only within rows of a mesh, so that DADT has to average
    between the rows."""
    ids = {id(p) for group in _groups(modules) if _averages_within_rows(group) for p in _parameters(group)}
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


def _groups(modules: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP2's parameter groups whose gradients have to be averaged between the rows of a mesh, by FSDP or in its
    place by DADT."""
    fsdp: list[Any] = [m for m in modules if any(b.__name__ == "FSDPModule" for b in type(m).__mro__)]
    states = [m._get_fsdp_state() for m in fsdp]
    groups: list[Any] = []
    for state in states:
        one = getattr(state, "_fsdp_param_group", None)
        groups += getattr(state, "_fsdp_param_groups", None) or ([] if one is None else [one])
    return [g for g in groups if type(g.mesh_info).__name__ == "HSDPMeshInfo" or _averages_within_rows(g)]


def _averages_within_rows(group: Any) -> bool:
    """Return whether FSDP averages this parameter group within rows only. By itself FSDP also averages between the rows
    of a mesh of several dimensions, so this means that DADT has changed it."""
    info = group.mesh_info
    return type(info).__name__ == "FSDPMeshInfo" and info.mesh.ndim > 1 and not getattr(info, "is_spmd_mesh", False)


def _parameters(group: Any) -> list[nn.Parameter]:
    return [each.sharded_param for each in group.fsdp_params]
