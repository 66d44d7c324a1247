"""The parameters that an optimizer trains, and the modules that have them."""

from __future__ import annotations

import weakref

import torch
from torch import nn


def listed(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters, each once: of tied weights given twice torch only warns."""
    return list({id(p): p for g in optimizer.param_groups for p in g["params"]}.values())


def below(roots: list[nn.Module]) -> list[weakref.ref[nn.Module]]:
    return [weakref.ref(m) for m in dict.fromkeys(m for root in roots for m in root.modules())]


def sparse_tables(modules: list[nn.Module], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    ids = {id(p) for p in parameters}
    tables = [m.weight for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
    return [table for table in tables if id(table) in ids]
