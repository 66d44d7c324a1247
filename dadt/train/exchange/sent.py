"""Finds out whether the script has changed gradients after they were sent ahead of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from dadt.comm.shards import local
from dadt.train.later import Later

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types, by size in bytes, as which values are compared. NaN does not equal itself, but its bits do, so an
overflow from a large loss scale does not count as a change."""
_PLACE, _EVERY = 256, 4096
"""A gradient is sampled by _PLACE consecutive elements out of every _EVERY, or by all elements if it has no more than
_EVERY."""
_AT_ONCE, _UNREAD = 25, 3
"""Number of first comparisons of GPU gradients for whose results the host waits, and number of later comparisons whose
results may be unread at a time."""


class SentGradients:
    """Gradients of one dtype and device, with a sample of their values at the time when they were sent."""

    def __init__(self, parameters: Sequence[torch.Tensor], number: int) -> None:
        """number: number of the exchange, which decides which elements of a gradient are sampled."""
        self._parameters = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
        self._number = number
        self._sample = self._look()

    @property
    def replaced(self) -> bool:
        """Whether any gradient was replaced, or changed in place with a new autograd version."""
        return any(p.grad is not g or (g is not None and g._version != v) for p, g, v in self._parameters)

    @property
    def written(self) -> bool:
        """Whether the sample shows that a gradient was changed without a new autograd version, for example through
        `.data` or numpy."""
        now = self._look()
        return len(now) != len(self._sample) or not all(map(torch.equal, self._sample, now))

    def differences(self) -> list[torch.Tensor]:
        """Return one flag per sample, on the gradients' device, that says whether the sample has changed."""
        found = self._look()
        if [each.shape for each in found] != [each.shape for each in self._sample]:
            return [torch.ones((), dtype=torch.bool, device=each.device) for each in found[:1] or self._sample[:1]]
        return [(before != now).any() for before, now in zip(self._sample, found, strict=True)]

    @torch.no_grad()
    def _look(self) -> list[torch.Tensor]:
        """Return the bits of all elements of small gradients, and of sampled elements of large gradients."""
        samples = [_sample(g, self._number) for _, g, _ in self._parameters if g is not None]
        alike = ([s for s in samples if s.dim() == dimensions] for dimensions in (1, 2))
        return [torch.cat(some).view(_BITS[some[0].element_size()]) for some in alike if some]


class Looks:
    """Comparisons of sent gradients on a GPU with their values at the time of sending. A script that changes no
    gradients in its first steps probably will not do so later, so the host waits only for the first results. Later
    results are read once they arrive, and a change then counts for a later step.
    """

    def __init__(self) -> None:
        self._number = 0
        self._coming: deque[Later] = deque()

    def find(self, sent: Sequence[SentGradients]) -> bool:
        """Whether this comparison, or an earlier comparison whose result has just arrived, has found a change."""
        self._number += 1
        flags = [flag for each in sent for flag in each.differences()]
        if flags:
            on_gpu = next((flag for flag in flags if flag.is_cuda), flags[0])
            self._coming.append(Later(torch.stack([flag.to(on_gpu.device) for flag in flags]).any()))
        found = False
        waits = self._number <= _AT_ONCE
        while self._coming and (waits or len(self._coming) > _UNREAD or self._coming[0].done):
            found |= bool(self._coming.popleft().read())
        return found


def _sample(gradient: torch.Tensor, number: int) -> torch.Tensor:
    """Return all values as a vector, or for a large gradient a matrix with one row per sampled range. The ranges depend
    on the exchange's number, so that a change missed in one step is seen in another."""
    values = local(gradient).detach()
    values = values._values() if values.layout == torch.sparse_coo else values
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if values.numel() <= _EVERY:
        return values.reshape(-1)
    dense = values.is_contiguous() or values.is_contiguous(memory_format=torch.channels_last)
    flat = values if dense else values.flatten()
    begin = flat.storage_offset() + number * _PLACE % _EVERY
    return torch.as_strided(flat, (flat.numel() // _EVERY, _PLACE), (_EVERY, 1), begin)
