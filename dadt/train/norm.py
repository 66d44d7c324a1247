"""Computes the common norm of many tensors without concatenating them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each tensor, computed in float32 or a wider type."""
    if {t.dtype for t in tensors} == {torch.float32}:
        # on a GPU, _foreach_norm is limited by memory bandwidth only, unlike norms of single tensors
        return list(torch._foreach_norm(list(tensors)))
    return [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def together(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors together, from the norm of each, as one float64 element on the first norm's
    device."""
    near = [norm.to(norms[0].device) for norm in norms]
    wide = torch.stack(near).to(torch.float64) if near[1:] else near[0].to(torch.float64)
    norm: torch.Tensor = torch.linalg.vector_norm(wide) if near[1:] else wide
    return norm
