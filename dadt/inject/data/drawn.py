"""Reproduces the random numbers that torch draws when a DataLoader's iterator is created. DADT may create torch's
iterator only when the first batch is requested, but draws the same random numbers already when the script creates its
iterator, so that the script's later draws are the same as without DADT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from dadt.inject.data.samplers import DRAW_ONCE, Loader, inner_sampler


class Drawn:
    """The random numbers drawn for one DataLoader iterator: drawn when this object is created, and drawn once more,
    with the same values, in the context `again`."""

    def __init__(self, loader: Loader) -> None:
        sampler = inner_sampler(loader)
        given = (loader.generator, getattr(sampler, "generator", None))
        generators = {id(each): each for each in (torch.default_generator, *given) if isinstance(each, torch.Generator)}
        self._before = [(each, each.get_state()) for each in generators.values()]
        _draw(loader.generator)  # draws the seed of the loader's worker processes
        self._is_foreseen = not loader.num_workers or isinstance(loader.dataset, IterableDataset)
        """Whether the draws made here are all that torch's iterator would draw at its creation."""
        if not self._is_foreseen and type(loader.batch_sampler) in (BatchSampler, type(None)):
            # With worker processes, torch draws the first indices when it creates the iterator. These samplers can be
            # iterated once more without harm, because they do not count their passes.
            self._is_foreseen = type(sampler) in (*DRAW_ONCE, SequentialSampler)
            if type(sampler) is RandomSampler and sampler.generator is None:
                _draw(None)
            elif self._is_foreseen:
                next(iter(sampler), None)
        self._after = self._states()

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator, _ in self._before]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which torch draws the same numbers once more, because the generators get back their states from
        before the draws. After the context, they have the states with which it was entered."""
        now = self._states()
        untouched = all(map(torch.equal, self._after, now))
        if untouched or self._is_foreseen:
            for generator, state in self._before:
                generator.set_state(state)
        try:
            yield
        finally:
            if self._is_foreseen and not untouched:
                for (generator, _), state in zip(self._before, now, strict=True):
                    generator.set_state(state)


def _draw(generator: torch.Generator | None) -> None:
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
