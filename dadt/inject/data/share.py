"""Divides one stream of samples into one share per rank, with the same number of steps on every rank.

Every class in this module iterates over the indices of a single process, in their order, and yields the StepShares of
one rank. All ranks iterate over the same indices, so together they lose no sample, and repeat only samples in a
StepShare that counts 0 samples. The module does not depend on torch: indices are whatever the sampler yields.

A step has `shares` shares, one for each rank with which the job began. If fewer ranks (`size`) read the data, because
others were lost, each reads more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple, cast


class StepShare(NamedTuple):
    """The part of one step's data that one rank reads."""

    index: Any
    """A list of indices, or the single index of a loader that does not batch."""
    samples: int
    """Number of samples that this rank contributes to the step; 0 for a repeated batch, which only keeps the rank in
    step with others."""
    whole: Sequence[Any]
    """Indices of all ranks in this step. They are equal on all ranks if all iterate in the same order."""


def portion(total: int, rank: int, size: int) -> range:
    """Return the positions that belong to `rank` if `total` items are divided among `size` ranks as evenly as possible,
    larger portions first."""
    small, larger = divmod(total, size)
    start = rank * small + min(rank, larger)
    return range(start, start + small + (rank < larger))


Fractions = Sequence[float]
"""Each rank's part of a step's samples, in the order of ranks. The parts add up to 1; an empty sequence means equal
parts."""


def portion_by(fractions: Fractions, total: int, rank: int, least: int) -> range:
    """Return the positions that belong to `rank` if `total` items are divided in proportion to `fractions`, but each
    rank gets at least `least` items."""
    beyond = [max(each * total - least, 0.0) for each in fractions]
    rest, share = total - least * len(fractions), sum(beyond) or 1.0
    ends = [round(rest * (part / share)) for part in accumulate(beyond, initial=0.0)]
    return range(ends[rank] + least * rank, ends[rank + 1] + least * (rank + 1))


def part(batch: Sequence[Any], rank: int, size: int, nominal: int, fractions: Fractions = ()) -> StepShare:
    """Return the contiguous portion of `rank` in a batch of at least one sample. If no sample is left for this rank,
    return the beginning of the batch, counted as 0 samples. fractions: each rank's part; empty if equal.

    If portions would have a single sample, although ordinary portions (of `nominal` samples) have more, fewer ranks
    share the batch, because BatchNorm cannot train on one sample.
    """
    least = min(2, nominal)
    takers = min(size, max(1, len(batch) // least))
    if rank >= takers:
        return StepShare(list(batch[:least]), 0, batch)
    by_speed = fractions and takers == size
    mine = portion_by(fractions, len(batch), rank, least) if by_speed else portion(len(batch), rank, takers)
    return StepShare(list(batch[mine.start : mine.stop]), len(mine), batch)


class PerRank:
    """Gives each rank batches of the script's batch size: the next `size` batches make one step.

    The last, incomplete step is divided as evenly as possible, or left out if `drop_last` is set.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batch_size: int,
        drop_last: bool,
        rank: int,
        size: int,
        shares: int = 0,
        fractions: Callable[[], Fractions] = tuple,
        whole: int = 0,
    ) -> None:
        """fractions: called once for each step; returns each rank's part of the step's samples. whole: number of
        samples in a step of all ranks together; 0: `batch_size` for each share."""
        self.sampler = sampler
        self.fractions = fractions
        self.drop_last = drop_last
        self.rank = rank
        self.size = size
        self.whole = whole or batch_size * (shares or size)
        """Number of samples in a step of all ranks together."""
        self.nominal = -(-self.whole // size)

    def __iter__(self) -> Iterator[StepShare]:
        indices = iter(self.sampler)
        while batch := list(islice(indices, self.whole)):
            if len(batch) == self.whole or not self.drop_last:
                yield part(batch, self.rank, self.size, self.nominal, self.fractions())

    def __len__(self) -> int:
        samples = len(cast(Sized, self.sampler))
        return samples // self.whole if self.drop_last else -(-samples // self.whole)


class Batches:
    """Gives the ranks whole batches of the script's own batch sampler in turn: of each group of `size` batches, rank
    number r gets batch number r.

    If fewer than `size` batches are left at the end, each is divided among some of the ranks, because samples of two
    batches may not fit into one: a sampler may sort them by size. If a step has more shares than ranks, or ranks are
    not equally fast, the samples of its batches are put together and divided.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        rank: int,
        size: int,
        shares: int = 0,
        fractions: Callable[[], Fractions] = tuple,
    ) -> None:
        """fractions: called once for each step; returns each rank's part of the step's samples."""
        self.batch_sampler = batch_sampler
        self.fractions = fractions
        self.rank = rank
        self.size = size
        self.shares = shares or size
        self.nominal = 0
        """Number of samples in an ordinary batch, the same on every rank; 0 until the first step was drawn."""

    def __iter__(self) -> Iterator[StepShare]:
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, self.shares)):
            whole = sum(map(samples_in, group)) * self.shares
            self.nominal = self.nominal or max(1, -(-whole // (len(group) * self.size)))
            fractions = self.fractions()
            if self.rank < len(group) == self.size == self.shares and not fractions:
                yield StepShare(group[self.rank], samples_in(group[self.rank]), group)
            elif all(map(is_batch, group)) and len(group) < self.size:
                yield self._left_over(group)
            elif all(map(is_batch, group)):
                yield part(list(chain.from_iterable(group)), self.rank, self.size, self.nominal, fractions)
            else:
                yield turn(group, self.rank)

    def _left_over(self, group: Sequence[Any]) -> StepShare:
        """Return this rank's part of one of fewer batches than ranks."""
        taken = [rank * len(group) // self.size for rank in range(self.size)]
        mine = taken[min(self.rank, self.size - 1)]  # a rank that has joined counts beyond the others
        among = taken.index(mine), taken.count(mine)
        share = part(group[mine], self.rank - among[0], among[1], self.nominal)
        return share._replace(whole=list(chain.from_iterable(group)))

    def __len__(self) -> int:
        return -(-len(cast(Sized, self.batch_sampler)) // self.shares)


class Items:
    """Gives ranks the items of a loader that does not batch, in turn. At the end of a pass, ranks for which no item is
    left repeat the first rank's item."""

    def __init__(self, sampler: Iterable[Any], rank: int, size: int) -> None:
        self.sampler = sampler
        self.rank = rank
        self.size = size
        self.nominal = 0

    def __iter__(self) -> Iterator[StepShare]:
        items = iter(self.sampler)
        while group := list(islice(items, self.size)):
            self.nominal = self.nominal or max(1, samples_in(group[0]))
            yield turn(group, self.rank)

    def __len__(self) -> int:
        return -(-len(cast(Sized, self.sampler)) // self.size)


class Repeated:
    """Gives ranks in turn the batches of a sampler that yields each batch `times` times in a row. Of `size` different
    batches, rank number r gets the r-th one, `times` times. At the end, ranks for which no batch is left repeat the
    first rank's."""

    def __init__(self, batch_sampler: Iterable[Any], times: int, rank: int, size: int) -> None:
        self.batch_sampler = batch_sampler
        self.times = times
        self.rank = rank
        self.size = size
        self.nominal = 0

    def __iter__(self) -> Iterator[StepShare]:
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, self.size * self.times))[:: self.times]:
            self.nominal = self.nominal or samples_in(group[0])
            yield from [turn(group, self.rank)] * self.times

    def __len__(self) -> int:
        different = -(-len(cast(Sized, self.batch_sampler)) // self.times)
        return -(-different // self.size) * self.times


class Divided:
    """Divides each batch of the script among the ranks, which keeps the number of steps of a single process."""

    def __init__(self, batch_sampler: Iterable[Any], nominal: int, rank: int, size: int) -> None:
        """nominal: the script's batch size; 0 if the batch sampler has none."""
        self.batch_sampler = batch_sampler
        self.rank = rank
        self.size = size
        self.nominal = -(-nominal // size)

    def __iter__(self) -> Iterator[StepShare]:
        for batch in self.batch_sampler:
            self.nominal = self.nominal or -(-len(batch) // self.size)
            yield part(batch, self.rank, self.size, self.nominal)

    def __len__(self) -> int:
        return len(cast(Sized, self.batch_sampler))


class Skipped:
    """A share without its first steps, for a script that resumes in the middle of a pass."""

    def __init__(self, share: PerRank | Batches | Repeated | Divided, steps: int) -> None:
        self.share = share
        self.steps = steps

    @property
    def nominal(self) -> int:
        return self.share.nominal

    def __iter__(self) -> Iterator[StepShare]:
        return islice(iter(self.share), self.steps, None)

    def __len__(self) -> int:
        return max(0, len(self.share) - self.steps)


Share = PerRank | Batches | Repeated | Items | Divided | Skipped


def unskipped(batch_sampler: Any) -> tuple[Any, int]:
    """Return the innermost batch sampler, and the number of batches that wrappers around it skip, such as
    accelerate.skip_first_batches."""
    steps = 0
    while hasattr(batch_sampler, "skip_batches") and hasattr(batch_sampler, "batch_sampler"):
        steps += batch_sampler.skip_batches
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler, steps


def turn(group: Sequence[Any], rank: int) -> StepShare:
    """Return the index at position `rank` of a group, or a repeat of its first index if the group is too short."""
    if rank < len(group):
        return StepShare(group[rank], samples_in(group[rank]), group)
    return StepShare(group[0], 0, group)


def is_batch(index: Any) -> bool:
    """Return whether an index is a batch of indices: a list, a tuple, or a tensor or array with at least one
    dimension."""
    return isinstance(index, (list, tuple)) or bool(getattr(index, "ndim", 0))


def samples_in(index: Any) -> int:
    return len(index) if is_batch(index) else 1


class Spare(NamedTuple):
    """A sample of another rank, for a rank whose stream ended before the rank had a sample of its own. It counts as 0
    samples and keeps the rank in step with others."""

    sample: Any


def every_nth(stream: Iterable[Any], rank: int, size: int, block: int = 0, whole_blocks: bool = False) -> Iterator[Any]:
    """Yield sample i of a stream if i % size == rank. Counting restarts in each block of `block` samples (0: one
    block).

    A sample is yielded only after the adjacent samples of the other ranks have been read, and the last one of a block
    only after the whole block. So ranks that stop at the same sample have read equally far, which matters for a stream
    that the next pass continues. With `whole_blocks`, an incomplete last block is dropped on every rank. If the stream
    ends before this rank had a sample, a Spare is yielded.
    """
    mine: list[Any] = []
    given = False
    position = 0
    last_own = (block - 1 - rank) // size * size + rank if block else -1
    """Position of this rank's last sample in a block; -1 if there is only one block."""
    last: Any = Spare  # the class Spare means no sample yet, because None may be a sample
    for sample in stream:
        last = sample
        if position % size == rank:
            mine.append(sample)
        position += 1
        row_ends = position % size == 0 and position - size + rank != last_own
        if position == block or (row_ends and not whole_blocks):
            given = given or bool(mine)
            yield from mine
            mine.clear()
        if position == block:
            position = 0
    if mine and not whole_blocks:
        given = True
        yield from mine
    if not given and last is not Spare:
        yield Spare(last)


def stream_steps(samples: int, batch_size: int, drop_last: bool, rank_size: int, workers: int = 1) -> int:
    """Return the number of batches of a stream of `samples` samples when each global batch has `batch_size * rank_size`
    samples. workers: number of worker processes, each of which yields batches of its part of the samples."""
    whole = batch_size * rank_size
    parts = [len(portion(samples, worker, workers)) for worker in range(workers)]
    return sum(part // whole if drop_last else -(-part // whole) for part in parts)
