"""What decides the order of a DataLoader's samples."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dadt.inject.data.share import Batches, Divided, PerRank

DRAW_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's samplers that draw from the global generators, and only at the first next."""

Loader = DataLoader[Any]


def inner_sampler(loader: Loader) -> Any:
    """The sampler that decides the order, or a batch sampler of the script's own."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def has_distributed_sampler(loader: Loader) -> bool:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers)


def sampler_slot(loader: Loader) -> str:
    """The attribute whose indices torch's iterator walks."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def samples_of(loader: Loader) -> int | None:
    """Samples of one pass, if the sampler or data set says."""
    sampler = inner_sampler(loader)
    sized = loader.dataset if sampler is loader.batch_sampler else sampler
    try:
        return len(sized) if isinstance(sized, Sized) else None
    except (TypeError, NotImplementedError):  # it has a __len__ only to say that it has no length
        return None


def draws_on(loader: Loader) -> bool:
    """Whether the sampler may draw from the global generators later than at its first next."""
    return type(inner_sampler(loader)) not in (*DRAW_ONCE, SequentialSampler)


def left_out_of(loader: Loader, ranks: int) -> int:
    """Samples of a pass that drop_last leaves out on all ranks together. ranks: that take a batch each."""
    samples = samples_of(loader)
    if samples is None or not loader.drop_last or loader.batch_size is None:
        return 0
    return samples % (loader.batch_size * ranks)


def share_of(batch_sampler: Any, rank: int, size: int, shares: int, *, divided: bool) -> PerRank | Batches | Divided:
    """The batches of the rank whose place among `size` readers is `rank`. divided: each rank reads a part of every
    batch of the script, rather than whole batches. shares: the shares of a step, which may be more than its readers."""
    plain = type(batch_sampler) is BatchSampler
    if divided:
        return Divided(batch_sampler, batch_sampler.batch_size if plain else 0, rank, size)
    if plain:
        sampler, batch_size = batch_sampler.sampler, batch_sampler.batch_size
        return PerRank(sampler, batch_size, batch_sampler.drop_last, rank, size, shares)
    return Batches(batch_sampler, rank, size, shares)
