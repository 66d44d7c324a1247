"""Decides among which ranks a pass over the data is divided, also after ranks were lost (`--redistribute`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dadt.comm.shards import is_sharded

if TYPE_CHECKING:
    from dadt.train.optimizers import Optimizers
    from dadt.train.runtime import Runtime


class Division(NamedTuple):
    """How each step of a pass over the data is divided among ranks. A step has one share for each rank with which the
    job began, but fewer ranks read the data once ranks were lost."""

    rank: int
    """This rank's index among the ranks that read data."""
    readers: int
    shares: int

    @property
    def is_spare(self) -> bool:
        """Whether the rank reads batches that count 0 samples (see `spare`)."""
        return self.rank >= self.readers

    @property
    def grows(self) -> bool:
        """Whether a rank's batches are larger than one share, because there are fewer reading ranks than shares."""
        return self.readers < self.shares


def among(readers: Collection[int], rank: int, shares: int) -> Division:
    """Return the division, as seen by `rank`, of a pass in which only the ranks `readers` read data."""
    ordered = sorted(readers)
    return Division(ordered.index(rank), len(ordered), shares)


def spare(shares: int) -> Division:
    """Return the division of a new worker that joins in the middle of a pass, whose data the other ranks may have
    divided among themselves. The new worker reads batches, too, but each counts 0 samples until the next pass."""
    return Division(shares, shares, shares)


def begun(rank: Runtime, *, by_island: bool = False) -> Division:
    """Return the division with which the job began: each rank reads its own share, and the shares of lost ranks are
    left out. by_island: whether each island has one share, because the script divides the data among the ranks of an
    island, or gives all of them the same data."""
    if by_island:
        world = rank.ranks.world
        return Division(world.island, len(world.equals), rank.ranks.shares // world.parts)
    return Division(rank.ranks.world.rank, rank.ranks.world.world_size, rank.ranks.shares)


def alike(optimizers: Optimizers) -> bool:
    """Return whether the ranks of an island need the same data, because their tensors are sharded in another way than
    by FSDP, such as by tensor parallelism."""
    every = list(optimizers)
    modules = [m for each in every for root in optimizers.root_modules(each) for m in root.modules()]
    sharded = any(is_sharded(p) for each in every for group in each.param_groups for p in group["params"])
    return sharded and not any(base.__name__ == "FSDPModule" for m in modules for base in type(m).__mro__)


def left_out(rank: Runtime) -> Division:
    """Return a division in which each rank reads its own share, and no rank reads the shares of lost ranks."""
    return Division(rank.ranks.world.rank, rank.ranks.shares, rank.ranks.shares)


def agree(rank: Runtime, name: str) -> Division:
    """Return the division for a new pass over the loader `name`; called on all ranks between the same two steps, and by
    a new worker for the pass in which it joins. With `--redistribute` all ranks gather which ranks take part in the
    pass, because one rank may know of a loss before another does, and wait for the result.
    """
    if rank.replay.under_way and rank.ranks.world.joins and rank.ranks.config.redistribute:
        return spare(rank.ranks.shares)
    if (
        rank.replay.under_way
        or rank.ranks.alone
        or not (rank.ranks.config.redistribute and rank.script.on_training_thread and rank.ranks.together)
    ):
        return begun(rank)
    there = rank.ranks.allgather(f"{name}: who reads", str(rank.ranks.world.rank).encode())
    rank.ranks.wait(there)
    return among([int(bytes(lane)) for lane in there.lanes], rank.ranks.world.rank, rank.ranks.shares)


def missing(rank: Runtime, lost: int, loaders: Sequence[tuple[str, int | None]]) -> str:
    """Return a sentence that says what happens to the shares of `lost` lost ranks. loaders: names of the loaders that
    train, each with its number of samples in a pass, or None if unknown."""
    if rank.ranks.config.redistribute:
        return "the running pass leaves out what was theirs, and later ones divide it among those who are left"
    size = rank.ranks.world.world_size
    if not loaders:
        return ""
    text = f"each pass leaves out {lost} of {size} shares of the data"
    for name, samples in loaders:
        if samples is not None:
            text += f", {'about ' * (samples % size > 0)}{samples * lost // size:,} of {samples:,} samples of {name}"
    return text
