"""Finds what decides the order of a DataLoader's samples, and makes each rank's share of the batches from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dadt.inject.data.share import Batches, Divided, Fractions, PerRank, Repeated

DRAW_ONCE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers of torch that draw from the global generators, and only when the first index is requested."""

_COMPARED = 100
"""Number of indices of a Subset that ranks compare."""

Loader = DataLoader[Any]


def inner_sampler(loader: Loader) -> Any:
    """Return the sampler that decides the order of samples, or the script's own batch sampler."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def has_distributed_sampler(loader: Loader) -> bool:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    # One of a single replica reads everything, as where a script shards by a world of its own that has one process.
    return any(getattr(sampler, "num_replicas", 1) != 1 and hasattr(sampler, "rank") for sampler in samplers)


def selection(dataset: Any) -> list[Any]:
    """Return the length and the first indices of each selection that the data set is of another one (random_split),
    which ranks have drawn differently if they did so after their training had begun."""
    found: list[Any] = []
    while isinstance(dataset, Subset):
        found.append((len(dataset.indices), list(islice(dataset.indices, _COMPARED))))
        dataset = dataset.dataset
    return found


def sampler_slot(loader: Loader) -> str:
    """Return the name of the loader's attribute over which torch's iterator iterates."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def samples_of(loader: Loader) -> int | None:
    """Return the number of samples of one pass, or None if neither sampler nor data set has a length."""
    sampler = inner_sampler(loader)
    sized = loader.dataset if sampler is loader.batch_sampler else sampler
    try:
        return len(sized) if isinstance(sized, Sized) else None
    # some classes define a __len__ that raises an error, since they have no length
    except (TypeError, NotImplementedError):
        return None


def group_of(batch_sampler: Any) -> int:
    """Return how many consecutive samples belong together; 0 if the order has no groups, or not TRL's kind of groups.
    TRL's RepeatSampler yields each prompt several times, for completions that are compared with each other."""
    sampler = getattr(batch_sampler, "sampler", None)
    group, *others = (getattr(sampler, name, 0) for name in ("mini_repeat_count", "repeat_count", "batch_size"))
    return group if isinstance(group, int) and all(others) else 0


def draws_on(loader: Loader) -> bool:
    """Return whether the loader's sampler may draw from the global generators for any index, not only for the first."""
    return type(inner_sampler(loader)) not in (*DRAW_ONCE, SequentialSampler)


def left_out_of(loader: Loader, ranks: int) -> int:
    """Return how many samples of a pass all ranks together leave out because of drop_last. ranks: number of ranks that
    each read a batch per step."""
    samples = samples_of(loader)
    if samples is None or not loader.drop_last or loader.batch_size is None:
        return 0
    return samples % (loader.batch_size * ranks)


def share_of(
    batch_sampler: Any,
    rank: int,
    size: int,
    shares: int,
    *,
    divided: bool,
    fractions: Callable[[], Fractions],
    divisors: Sequence[int] = (),
) -> PerRank | Batches | Repeated | Divided:
    """Return the batches of one rank, which is number `rank` of `size` reading ranks. divided: whether each rank reads
    a part of every batch of the script, not whole batches. shares: number of shares of a step, which may be larger than
    `size`. fractions: returns each rank's part of one step's samples. divisors: for each rank, the number by which the
    script's batch size is divided; empty if no rank has smaller batches.
    """
    plain = type(batch_sampler) is BatchSampler
    if divided:
        return Divided(batch_sampler, batch_sampler.batch_size if plain else 0, rank, size)
    if plain and (group := group_of(batch_sampler)):
        sampler = batch_sampler.sampler
        times = sampler.repeat_count if sampler.batch_size * group == batch_sampler.batch_size else 1
        return Repeated(batch_sampler, times, rank, size)
    if plain:
        sampler, batch_size = batch_sampler.sampler, batch_sampler.batch_size
        if divisors:
            sizes = [max(min(2, batch_size), batch_size // each) for each in divisors]
            parts = [each / sum(sizes) for each in sizes]
            return PerRank(sampler, batch_size, batch_sampler.drop_last, rank, size, 0, lambda: parts, sum(sizes))
        return PerRank(sampler, batch_size, batch_sampler.drop_last, rank, size, shares, fractions)
    return Batches(batch_sampler, rank, size, shares, fractions)
