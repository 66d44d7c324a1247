"""Gradients that were sent ahead of the step: whether the script has changed them since."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Compared as these, as no number equals itself, and a loss scale that is too large is no change."""
_PLACE, _EVERY = 256, 4096
"""Of each so many elements so many in a row are looked at; all of gradients that have no more."""


class Sent:
    """Gradients of one dtype and device, as they were when they were sent."""

    def __init__(self, parameters: Sequence[torch.Tensor], number: int) -> None:
        """number: of the exchange."""
        self._parameters = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
        self._number = number
        self._sample = self._look()

    @property
    def replaced(self) -> bool:
        """Or changed in place, as far as autograd notices."""
        return any(p.grad is not g or (g is not None and g._version != v) for p, g, v in self._parameters)

    @property
    def written(self) -> bool:
        """Changed in a way that raises no version, as through `.data` or numpy, as far as a sample shows."""
        now = self._look()
        return len(now) != len(self._sample) or not all(map(torch.equal, self._sample, now))

    @torch.no_grad()
    def _look(self) -> list[torch.Tensor]:
        """The bits of small gradients, and of some places in large ones."""
        samples = [_sample(g, self._number) for _, g, _ in self._parameters if g is not None]
        alike = ([s for s in samples if s.dim() == dimensions] for dimensions in (1, 2))
        return [torch.cat(some).view(_BITS[some[0].element_size()]) for some in alike if some]


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
