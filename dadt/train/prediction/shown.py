"""Parameters that show predicted weights, or would: what becomes of them, and whether the script has changed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dadt.train.prediction.memory import lends

PARTS, _LEAST = 4, 4096
"""Parts of each parameter, of which each look is at another one; and the fewest elements of a part."""


class ShownParameter(NamedTuple):
    """A parameter that shows predicted weights, or would."""

    parameter: torch.Tensor
    true: torch.Tensor
    """The memory of its true weights."""
    place: torch.Tensor
    """The memory of its predicted weights."""
    lent: bool
    """Whether the parameter was given the memory of its predicted weights."""


def still_lent(rows: Sequence[ShownParameter]) -> list[bool]:
    return [
        lent and p.data_ptr() == place.data_ptr() and p.shape == place.shape and lends(p) for p, _, place, lent in rows
    ]


def show(rows: Sequence[ShownParameter], lent: Sequence[bool]) -> None:
    """Give parameters their true weights, by memory where it is lent."""
    copied = []
    for (p, true, place, _), by_memory in zip(rows, lent, strict=True):
        if by_memory:
            p.data = true
        elif p.data_ptr() != true.data_ptr():
            # Moved, as to another device; else the script shows something else for a while, as an average of weights,
            # and may give the place back to the parameter.
            if _moved(p.data, place):
                copied.append((p.data, true))
            copied.append((place, true))
    copy(copied)


def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        into, values = zip(*pairs, strict=True)
        torch._foreach_copy_(into, values)


def part(t: torch.Tensor, number: int) -> torch.Tensor:
    """The values of one of a tensor's PARTS; of the first where it has fewer."""
    size = max(_LEAST, -(-t.numel() // PARTS))
    begin = number * size if number * size < t.numel() else 0
    flat = torch.as_strided(t, (t.numel(),), (1,)) if _is_dense(t) else t.flatten()
    return flat[begin : begin + size]


def _is_dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride()


def _moved(now: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether these are the same values in other memory."""
    if now.data_ptr() == place.data_ptr() or now.shape != place.shape:
        return False
    return torch.allclose(now.to(place), place, rtol=0.0, atol=0.0, equal_nan=True)


def replaced(now: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether these, in other memory, are other values."""
    return now.shape == place.shape and not _moved(now, place)
