"""Restores the true weights of parameters that contain predicted weights, and detects changes of these by the
script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dadt.train.prediction.memory import lends

PARTS, _LEAST = 4, 4096
"""Number of parts into which each parameter is divided, since each check reads one part only, and minimum number of
elements of a part."""


class ShownParameter(NamedTuple):
    """One parameter that contains predicted weights, or whose predicted weights are suspended."""

    parameter: torch.Tensor
    true: torch.Tensor
    """The memory of the parameter's true weights."""
    place: torch.Tensor
    """The memory of the parameter's predicted weights."""
    lent: bool
    """Whether the parameter uses the memory of its predicted weights instead of a copy."""


def still_lent(rows: Sequence[ShownParameter]) -> list[bool]:
    return [
        lent and p.data_ptr() == place.data_ptr() and p.shape == place.shape and lends(p) for p, _, place, lent in rows
    ]


def show(rows: Sequence[ShownParameter], lent: Sequence[bool]) -> None:
    """Restore the parameters' true weights: where `lent` is true, by giving the parameter the memory of its true
    weights, otherwise by copying them."""
    copied = []
    for (p, true, place, _), by_memory in zip(rows, lent, strict=True):
        if by_memory:
            p.data = true
        elif p.data_ptr() != true.data_ptr():
            # If the predicted weights were moved to other memory, for example to another device, the true weights are
            # copied there. Otherwise the script shows other values for a while, such as averaged weights, and may give
            # the old memory back to the parameter, so only the old memory is restored.
            if _moved(p.data, place):
                copied.append((p.data, true))
            copied.append((place, true))
    copy(copied)


def copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        into, values = zip(*pairs, strict=True)
        torch._foreach_copy_(into, values)


def part(t: torch.Tensor, number: int) -> torch.Tensor:
    """Return the values of part `number` of a tensor that is divided into PARTS parts, or of the first part if the
    tensor has fewer parts."""
    size = max(_LEAST, -(-t.numel() // PARTS))
    begin = number * size if number * size < t.numel() else 0
    flat = torch.as_strided(t, (t.numel(),), (1,)) if _is_dense(t) else t.flatten()
    return flat[begin : begin + size]


def _is_dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride()


def _moved(now: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether the two tensors have equal values in different memory."""
    if now.data_ptr() == place.data_ptr() or now.shape != place.shape:
        return False
    return torch.allclose(now.to(place), place, rtol=0.0, atol=0.0, equal_nan=True)


def replaced(now: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether the two tensors have the same shape, but different values in different memory."""
    return now.shape == place.shape and not _moved(now, place)
