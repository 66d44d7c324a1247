"""A pass over a loader during a replay: indices are drawn as usual, but only one batch of each size is read from the
data set and then returned again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from dadt.inject.data.samplers import Loader, sampler_slot
from dadt.inject.data.view import BatchView, like

if TYPE_CHECKING:
    from dadt.train.runtime import Runtime

AHEAD = 2
"""Number of batches that a training loop may fetch before it trains on the first of them."""


class ReplayedPass:
    """Iterates over a loader without reading its data, and reads real batches again when the replay is about to end in
    this pass."""

    def __init__(
        self, rank: Runtime, iterate: Callable[[Loader], Iterator[Any]], view: Loader, read: dict[int, Any]
    ) -> None:
        """iterate: returns torch's own iterator over a loader. read: one batch for each batch size, by size."""
        self._rank, self._iterate, self._view, self._read = rank, iterate, view, read
        # An iterator without worker processes draws the same random numbers as one with workers.
        here = like(view, num_workers=0, timeout=0, persistent_workers=False, prefetch_factor=None)
        self._drawing: Any = iterate(here)
        if view.num_workers:  # with workers, torch draws indices ahead, so the first index is drawn with the iterator
            indices: Any = self._drawing
            indices._sampler_iter = chain(list(islice(indices._sampler_iter, 1)), indices._sampler_iter)
        self._rest: Iterator[Any] | None = None

    def __iter__(self) -> ReplayedPass:
        return self

    def __next__(self) -> Any:
        if self._rest is None and self._rank.replay.under_way:
            index = self._drawing._next_index()
            if self._rank.ranks.step >= self._rank.replay.goal_step - AHEAD:
                return self._drawing._dataset_fetcher.fetch(index)
            size = len(index) if isinstance(index, list | tuple) else 0
            if size not in self._read:
                self._read[size] = self._drawing._dataset_fetcher.fetch(index)
            # Copies, because a script that changes a batch in place would otherwise change the next one.
            return tree_map_only(torch.Tensor, lambda t: t.clone(), self._read[size])
        if self._rest is None:
            self._rest = self._reading()
        return next(self._rest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._drawing, name)

    def _reading(self) -> Iterator[Any]:
        view = self._view
        if not view.num_workers:
            return self._drawing  # type: ignore[no-any-return]
        generator = view.generator if view.generator is not None else torch.default_generator
        state = generator.get_state()  # restored below, because the workers' seed was already drawn when the pass began
        rest = like(view, **{sampler_slot(view): Rest(self._drawing._sampler_iter)})
        iterator = self._iterate(rest)
        generator.set_state(state)
        return iterator


class Rest:
    """Sampler that yields the remaining indices of an iterator that has already begun."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


class Aside(BatchView):
    """Iterator over batches. While a batch is produced, values read from tensors are not recorded as reads of the
    script."""

    def __init__(self, rank: Runtime, batches: Iterator[Any]) -> None:
        self._rank, self.batches = rank, batches

    def __next__(self) -> Any:
        with self._rank.replay.aside():
            return next(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
