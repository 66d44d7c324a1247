"""Recognizes optimizers of tensors that are created for a single batch, such as perturbations and latents. Each rank
has another batch, so averaging their gradients over ranks would be meaningless."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dadt.train.batch_weight import Pass
from dadt.train.trained import listed


class OneBatch:
    """Recognizes, with the same result on all ranks, optimizers of tensors that are created for a single batch. For the
    first optimizer of a kind, ranks exchange their findings, because the sizes of their batches, and so of these
    tensors, may differ.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Pass] | None = None
        """The pass over a loader from which the last batch was drawn."""
        self._samples = 0
        """Number of samples in the last batch."""
        self._fitting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._kinds: set[tuple[Any, ...]] = set()
        """Kinds of optimizers (class, and dimensions and dtypes of the tensors) that train tensors of a single batch,
        as all ranks have agreed."""
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def drew(self, source: Pass, samples: int) -> None:
        """Note a training batch that a loader returns to the script."""
        self._source, self._samples = weakref.ref(source), samples

    def built(self, optimizer: torch.optim.Optimizer) -> bool:
        """Examine a new optimizer whose parameters belong to no module. Returns whether its kind is already known to
        train tensors of a single batch."""
        source = self._source() if self._source is not None else None
        if source is None or source.is_over:
            return False
        if _kind(optimizer) in self._kinds:
            self.optimizers.add(optimizer)
        elif all(self._is_made_for_batch(p) for p in listed(optimizer)):
            self._fitting.add(optimizer)
        return optimizer in self.optimizers

    def fits(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's tensors on this rank look created for a single batch, for an optimizer whose kind is
        not known yet."""
        return optimizer in self._fitting

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that all ranks have agreed that this optimizer, and later ones of its kind, train tensors of a single
        batch."""
        self._kinds.add(_kind(optimizer))
        self.optimizers.add(optimizer)

    def _is_made_for_batch(self, p: torch.Tensor) -> bool:
        """Whether the tensor has one row per sample of the last batch. A vector with a single element proves nothing,
        so it does not count."""
        return p.ndim > 0 and p.shape[0] == self._samples and (p.ndim > 1 or self._samples > 1)


def _kind(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return type(optimizer), *((p.ndim, p.dtype) for p in listed(optimizer))
