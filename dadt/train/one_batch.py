"""Optimizers over tensors that are made for one batch, as perturbations and latents are: each rank has a batch of its
own, so that a mean over ranks is of nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dadt.train.batch_weight import Pass
from dadt.train.trained import listed


class OneBatch:
    """Knows such optimizers by what all ranks see alike. The first of a kind is looked at on all ranks: their batches,
    and so the sizes of their tensors, may differ."""

    def __init__(self) -> None:
        self._source: weakref.ref[Pass] | None = None
        """The pass that the last batch was drawn from."""
        self._samples = 0
        """The number of samples in that batch."""
        self._fitting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._kinds: set[tuple[Any, ...]] = set()
        """The kinds of such optimizers that all ranks have agreed on."""
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def drew(self, source: Pass, samples: int) -> None:
        """A training batch was handed to the script."""
        self._source, self._samples = weakref.ref(source), samples

    def built(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer of no module's parameters was built. Returns whether it is of a kind that is known."""
        source = self._source() if self._source is not None else None
        if source is None or source.is_over:
            return False
        if _kind(optimizer) in self._kinds:
            self.optimizers.add(optimizer)
        elif all(self._is_made_for_batch(p) for p in listed(optimizer)):
            self._fitting.add(optimizer)
        return optimizer in self.optimizers

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this rank takes it for one, where its kind is not known yet."""
        return optimizer in self._fitting

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """All ranks take it for one, and so what comes later of this kind."""
        self._kinds.add(_kind(optimizer))
        self.optimizers.add(optimizer)

    def _is_made_for_batch(self, p: torch.Tensor) -> bool:
        """It has a row for each sample; a vector of one number says nothing."""
        return p.ndim > 0 and p.shape[0] == self._samples and (p.ndim > 1 or self._samples > 1)


def _kind(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return type(optimizer), *((p.ndim, p.dtype) for p in listed(optimizer))
