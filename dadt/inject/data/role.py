"""What one DataLoader is for."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from dadt.inject.data.division import begun
from dadt.inject.data.drawn import Drawn
from dadt.inject.data.feed import Feed
from dadt.inject.data.samplers import (
    DRAW_ONCE,
    Loader,
    has_distributed_sampler,
    inner_sampler,
    left_out_of,
    samples_of,
)
from dadt.train.runtime import Runtime

TRAINS, EVALUATES, ALONE = "trains", "evaluates", "alone"


class LoaderRole:
    """What is known of one DataLoader: what it is for, and how its passes are read."""

    def __init__(self, number: int, runtime: Runtime) -> None:
        self.number = number
        self.name = f"DataLoader #{number}"
        self.kind = ""
        """TRAINS, EVALUATES or ALONE; empty until it is fixed for good."""
        self.gives_all = False
        """Whether its latest pass gives every rank everything, rather than each its share."""
        self.drawn: Drawn | None = None
        """The random numbers that the iterator of its latest pass has drawn, if it was made before the pass began; else
        None."""
        self.has_trained = False
        self.is_doubted = False
        """It counts as evaluating in this pass, but trains if a backward follows."""
        self.views: dict[bool, Loader] = {}
        """The loader's views, by whether they give everything, or each rank its share."""
        self.division = begun(runtime)
        """The ranks among which its latest pass was divided."""
        self.feed: Feed | None = None
        """The feed, kept from pass to pass, of a loader with persistent workers; else None."""
        self.steps: dict[int, int] = {}
        """Number of steps of the last whole pass over a stream that worker processes read, by the stream's length in
        samples."""


def sentence(loader: Loader, role: LoaderRole, size: int, takers: int) -> str:
    """The sentence for the user about a loader. takers: number of ranks that take a batch of their own in each step."""
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
