"""The ranks among which a pass over the data is divided, also when ranks were lost (`--redistribute`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dadt.train.runtime import Runtime


class Division(NamedTuple):
    """The division of each step of a pass. A step has one share for each rank with which the job began; fewer ranks may
    read it."""

    rank: int
    """This rank's place among the readers."""
    readers: int
    shares: int

    @property
    def grows(self) -> bool:
        """Whether batches are larger than a share, as there are fewer readers than shares."""
        return self.readers < self.shares


def begun(rank: Runtime) -> Division:
    """The division with which the job began: each rank reads its share, and those of lost ranks are left out."""
    return Division(rank.ranks.world.rank, rank.ranks.world.world_size, rank.ranks.shares)


def left_out(rank: Runtime) -> Division:
    """A division in which each rank reads its share, and shares without a rank are left out."""
    return Division(rank.ranks.world.rank, rank.ranks.shares, rank.ranks.shares)


def agree(rank: Runtime, name: str) -> Division:
    """A pass over `name` begins, on all ranks between the same steps. One may know of a loss by then that another has
    not heard of, so all gather who is there: what is gathered is the same on all, whatever happens meanwhile. Waits
    for all ranks."""
    if (
        rank.replay.under_way
        or rank.ranks.alone
        or not (rank.ranks.config.redistribute and rank.script.on_training_thread and rank.ranks.together)
    ):
        return begun(rank)
    there = rank.ranks.allgather(f"{name}: who reads", str(rank.ranks.world.rank).encode())
    rank.ranks.wait(there)
    readers = sorted(int(bytes(lane)) for lane in there.lanes)
    return Division(readers.index(rank.ranks.world.rank), len(readers), rank.ranks.shares)


def missing(rank: Runtime, lost: int, loaders: Sequence[tuple[str, int | None]]) -> str:
    """Says what becomes of the shares of `lost` lost ranks. loaders: names of the loaders that train, each with its
    samples in a pass, or None if they are not known."""
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
