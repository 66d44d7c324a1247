"""The attachments of this rank, one for each optimizer that DADT manages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import attrgetter

import torch

from dadt.comm import shards
from dadt.train.attachment import Attachment

_INDEX = attrgetter("index")


class Attachments:
    """Iterates over the attachments (managed optimizers) of this rank, oldest first, which is the same order on all
    ranks."""

    def __init__(self) -> None:
        self._attached: weakref.WeakKeyDictionary[torch.optim.Optimizer, Attachment] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Attachment]:
        return iter(sorted(self._attached.values(), key=_INDEX))

    def __len__(self) -> int:
        return len(self._attached)

    def of(self, optimizer: torch.optim.Optimizer) -> Attachment | None:
        """Return the Attachment that manages the optimizer, or None if DADT does not manage it yet."""
        return self._attached.get(optimizer)

    def add(self, attachment: Attachment) -> None:
        self._attached[attachment.optimizer] = attachment

    def clear(self) -> None:
        self._attached.clear()

    def sharing(self, ids: set[int]) -> list[Attachment]:
        """Return the attachments whose optimizers train these parameters, given by id: the newest attachment that
        trains exactly these parameters. If there is none, the newest attachments that train some, until all parameters
        are covered."""
        mine = [(a, {id(p) for p in a.parameters}) for a in reversed(list(self))]
        exact = [a for a, owned in mine if owned and owned == ids]
        if exact:
            return exact[:1]
        chosen: list[Attachment] = []
        for a, owned in mine:
            if owned & ids:
                chosen.append(a)
                ids = ids - owned
        return chosen

    def discard_averages(self, ids: set[int]) -> None:
        """End the step of each optimizer that has no averaged gradients left to apply, as skipped. Called when the
        script drops the gradients of these parameters, given by id."""
        for attachment in self:
            mine = attachment.parameters if attachment.consumed and not attachment.stepping else []
            others = [p for p in mine if id(p) not in ids]
            # If the step applies nothing, all averaged gradients are zeros, so zeros do not show that the script
            # dropped them.
            kept = bool(others) and (attachment.algorithm.holds or any(map(_counts, others)))
            if len(others) < len(mine) and not kept:
                attachment.skipped()


def _counts(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a gradient with any nonzero value."""
    gradient = shards.gradient(parameter)
    if gradient is not None and gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    return gradient is not None and bool(gradient.any())
