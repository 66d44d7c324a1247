"""The norm of many tensors together."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each tensor, in float32 at least."""
    if {t.dtype for t in tensors} == {torch.float32}:
        return list(torch._foreach_norm(list(tensors)))  # on a GPU at the memory's speed, as one alone is not
    return [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def together(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all, of the norms of each, on the first one's device; one element of float64."""
    near = [norm.to(norms[0].device) for norm in norms]
    wide = torch.stack(near).to(torch.float64) if near[1:] else near[0].to(torch.float64)
    norm: torch.Tensor = torch.linalg.vector_norm(wide) if near[1:] else wide
    return norm
