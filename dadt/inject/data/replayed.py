"""A pass over a loader without reading: its indices are drawn as ever, and one batch of each size stands for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from dadt.inject.data.samplers import Loader, sampler_slot
from dadt.inject.data.view import like

if TYPE_CHECKING:
    from dadt.train.runtime import Runtime

AHEAD = 2
"""Steps by which a loop may fetch its batches before it trains on them."""


class ReplayedPass:
    """Reads again where the replay ends in it, or is about to end."""

    def __init__(
        self, rank: Runtime, iterate: Callable[[Loader], Iterator[Any]], view: Loader, read: dict[int, Any]
    ) -> None:
        """iterate: gives torch's own iterator. read: the batches, by the number of their indices."""
        self._rank, self._iterate, self._view, self._read = rank, iterate, view, read
        # It draws from the generators what one with worker processes draws.
        here = like(view, num_workers=0, timeout=0, persistent_workers=False, prefetch_factor=None)
        self._drawing: Any = iterate(here)
        if view.num_workers:  # for which indices are drawn ahead
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
            # Whoever changes a batch in place changes a copy.
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
        state = generator.get_state()  # the seed for its workers was drawn when the pass began
        rest = like(view, **{sampler_slot(view): Rest(self._drawing._sampler_iter)})
        iterator = self._iterate(rest)
        generator.set_state(state)
        return iterator


class Rest:
    """A sampler that has begun."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Any]:
        return self._indices


class Aside:
    """What happens while a batch is made is not the script's own reading of tensors."""

    def __init__(self, rank: Runtime, batches: Iterator[Any]) -> None:
        self._rank, self._batches = rank, batches

    def __iter__(self) -> Aside:
        return self

    def __next__(self) -> Any:
        with self._rank.replay.aside():
            return next(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("_rank", "_batches"):
            raise AttributeError(name)
        return getattr(self._batches, name)
