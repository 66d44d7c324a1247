"""Gradients that were sent ahead of the step: whether the script has changed them since."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from dadt.train.later import Later

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Values are compared as these, by their size in bytes: NaN does not equal itself, and a loss scale that is too large
is no change."""
_PLACE, _EVERY = 256, 4096
"""_PLACE elements in a row are looked at in each _EVERY of a gradient; all of them if it has no more than _EVERY."""
_AT_ONCE, _UNREAD = 25, 3
"""First looks at a GPU's gradients whose result is waited for; and how many later ones may be unread."""


class SentGradients:
    """Gradients of one dtype and device, as they were when they were sent."""

    def __init__(self, parameters: Sequence[torch.Tensor], number: int) -> None:
        """number: that of the exchange, which decides what places of a gradient are looked at."""
        self._parameters = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
        self._number = number
        self._sample = self._look()

    @property
    def replaced(self) -> bool:
        """Whether a gradient was replaced, or changed in place as far as autograd notices."""
        return any(p.grad is not g or (g is not None and g._version != v) for p, g, v in self._parameters)

    @property
    def written(self) -> bool:
        """Whether one was changed without a new version, as through `.data` or numpy, as far as a sample shows."""
        now = self._look()
        return len(now) != len(self._sample) or not all(map(torch.equal, self._sample, now))

    def differences(self) -> list[torch.Tensor]:
        """Like `written`, as one flag for each sample, on the gradients' device."""
        found = self._look()
        if [each.shape for each in found] != [each.shape for each in self._sample]:
            return [torch.ones((), dtype=torch.bool, device=each.device) for each in found[:1] or self._sample[:1]]
        return [(before != now).any() for before, now in zip(self._sample, found, strict=True)]

    @torch.no_grad()
    def _look(self) -> list[torch.Tensor]:
        """The bits of small gradients, and of some places in large ones."""
        samples = [_sample(g, self._number) for _, g, _ in self._parameters if g is not None]
        alike = ([s for s in samples if s.dim() == dimensions] for dimensions in (1, 2))
        return [torch.cat(some).view(_BITS[some[0].element_size()]) for some in alike if some]


class Looks:
    """Looks at a GPU's gradients. A script that has not written to them in its first steps is taken to go on so, and
    looks are read once they have come: what one finds is a change in a later step, too."""

    def __init__(self) -> None:
        self._number = 0
        self._coming: deque[Later] = deque()

    def find(self, sent: Sequence[SentGradients]) -> bool:
        """Whether one of the last looks, of which this is one, has found a change."""
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
    """A row for each place, or all in one dimension. Places move with the number of the exchange, so that what is
    missed in one step is seen in another."""
    values = gradient.detach()
    values = values._values() if values.layout == torch.sparse_coo else values
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if values.numel() <= _EVERY:
        return values.reshape(-1)
    dense = values.is_contiguous() or values.is_contiguous(memory_format=torch.channels_last)
    flat = values if dense else values.flatten()
    begin = flat.storage_offset() + number * _PLACE % _EVERY
    return torch.as_strided(flat, (flat.numel() // _EVERY, _PLACE), (_EVERY, 1), begin)
