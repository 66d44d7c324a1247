"""What one DataLoader is for."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from dadt.inject.data.division import begun
from dadt.inject.data.drawn import Drawn
from dadt.inject.data.feed import Feed, LoadingRank
from dadt.inject.data.samplers import (
    DRAW_ONCE,
    Loader,
    has_distributed_sampler,
    inner_sampler,
    left_out_of,
    samples_of,
)

TRAINS, EVALUATES, ALONE = "trains", "evaluates", "alone"


class Role:
    """The state of one loader."""

    def __init__(self, number: int, runtime: LoadingRank) -> None:
        self.number = number
        self.name = f"DataLoader #{number}"
        self.kind = ""
        """Empty until it is fixed."""
        self.gives_all = False
        """In its latest pass."""
        self.drawn: Drawn | None = None
        """What the iterator of its latest pass has drawn, if it was made before that began."""
        self.has_trained = False
        self.is_doubted = False
        """It evaluates unless a backward follows."""
        self.views: dict[bool, Loader] = {}
        """The views by which it gives all, and each rank its share."""
        self.division = begun(runtime)
        """Among whom its latest pass was divided."""
        self.feed: Feed | None = None
        """The feed of persistent workers."""
        self.steps: dict[int, int] = {}
        """Of the last whole pass over a stream with worker processes, by the samples that it then had."""


def sentence(loader: Loader, role: Role, size: int, takers: int) -> str:
    """What the user is told of a loader. takers: ranks that take a batch of their own in each step."""
    if role.kind == ALONE:
        if has_distributed_sampler(loader):
            return f"{role.name}: shares out its data itself, left as it is."
        return f"{role.name}: left as it is, as the script knows its rank and may share out its data itself."
    if isinstance(loader.dataset, IterableDataset):
        what, share = "a stream", f"one sample in {size} per worker"
    else:
        samples = samples_of(loader)
        shuffled = ", shuffled" if isinstance(inner_sampler(loader), DRAW_ONCE) else ""
        what = "samples" if samples is None else f"{samples:,} samples"
        what += shuffled
        about = "about " if samples is not None and samples % size else ""
        share = f"1 in {size} per worker" if samples is None else f"{about}{samples // size:,} per worker"
    if role.kind == TRAINS:
        left_out = left_out_of(loader, takers)
        drops = f"; drop_last leaves {left_out:,} of them out" if left_out else ""
        return f"{role.name} ({what}): trains, {share}{drops}."
    return f"{role.name} ({what}): evaluates, all of it."
