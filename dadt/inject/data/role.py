"""Records what one DataLoader is used for: training, evaluation, or data that the script divides itself."""

from __future__ import annotations

from torch.utils.data import BatchSampler, IterableDataset

from dadt.errors import ConfigError
from dadt.inject.data.division import Division, begun
from dadt.inject.data.drawn import Drawn
from dadt.inject.data.feed import Feed
from dadt.inject.data.hugging_face import GROUP
from dadt.inject.data.samplers import (
    DRAW_ONCE,
    Loader,
    group_of,
    has_distributed_sampler,
    inner_sampler,
    left_out_of,
    samples_of,
)
from dadt.inject.data.share import unskipped
from dadt.train.runtime import Runtime

TRAINS, EVALUATES, ALONE = "trains", "evaluates", "alone"


class LoaderRole:
    """The use of one DataLoader (training, evaluation, or data that the script divides itself), and how its passes are
    read."""

    def __init__(self, number: int, runtime: Runtime) -> None:
        self.number = number
        self._runtime = runtime
        self.name = f"DataLoader #{number}"
        self.kind = ""
        """TRAINS, EVALUATES or ALONE; empty until the role is final."""
        self.by_island = False
        """Whether each island gets a share, instead of each rank, because the script divides the data among the ranks
        of an island, or because all of them need the same data."""
        self.gives_all = False
        """Whether the loader's latest pass gives every rank all data, instead of giving each rank its share."""
        self.drawn: Drawn | None = None
        """The random numbers drawn by the iterator of the latest pass, if it was created before the pass began; else
        None."""
        self.has_trained = False
        self.is_doubted = False
        """Whether the loader counts as evaluating in its latest pass, but will count as training in later passes if a
        backward follows."""
        self.views: dict[bool, Loader] = {}
        """The loader's views, one for passes that give all data (key True), one for passes that give each rank its
        share (False)."""
        self.division = begun(runtime)
        """How the latest pass of the loader was divided among ranks."""
        self.feed: Feed | None = None
        """The Feed (iterator over this rank's batches) of a loader with persistent workers, which all its passes use;
        else None."""
        self.steps: dict[int, int] = {}
        """Number of steps of the last complete pass over a stream read by worker processes, by the stream's length in
        samples."""

    @property
    def begun(self) -> Division:
        """How a pass of the loader is divided among ranks while no rank is lost."""
        return begun(self._runtime, by_island=self.by_island)

    @property
    def takers(self) -> int:
        """Number of ranks that read a batch of their own in each step; 1 if all ranks divide one batch."""
        return 1 if self._runtime.ranks.config.batch == "global" else self.begun.shares


def check_divisible(loader: Loader, role: LoaderRole, batch: str, divisors: str) -> None:
    """Raise ConfigError if this loader's batches cannot be divided as `--batch` says. batch: the value of `--batch`.
    divisors: `World.divisors`."""
    size = role.begun.shares
    if (group := getattr(loader.dataset, GROUP, 1)) > 1:
        raise ConfigError(
            f"{role.name} is a stream in which {group} samples in a row belong together, of which each of {size}"
            " workers would get a part; train from a data set with a length"
        )
    batch_sampler, _ = unskipped(loader.batch_sampler)
    group = group_of(batch_sampler)
    if divisors and (type(batch_sampler) is not BatchSampler or group):
        raise ConfigError(
            f"--batch memory: {role.name} has no batch size that could be less on a worker without enough memory;"
            " use smaller batches"
        )
    if batch != "global":
        return
    if loader.batch_size is not None and loader.batch_size < size:
        raise ConfigError(
            f"--batch global: {role.name} has batches of {loader.batch_size}, which cannot be divided"
            f" among {size} workers; use fewer workers, larger batches or --batch per-rank"
        )
    if group and loader.batch_size is not None and loader.batch_size % (size * group):
        raise ConfigError(
            f"--batch global: {role.name} has batches of {loader.batch_size} in groups of {group} that belong together,"
            f" which cannot be divided among {size} workers; use larger batches or --batch per-rank"
        )
    if not loader._auto_collation:
        raise ConfigError(
            f"--batch global: {role.name} has no batch size that could be divided among {size} workers;"
            f" use --batch per-rank, or --no-share {role.number}"
        )


def sentence(loader: Loader, role: LoaderRole, size: int, takers: int) -> str:
    """Return the sentence for the user about a loader. size: number of shares. takers: number of ranks that read a
    batch of their own in each step."""
    if role.kind == ALONE:
        if has_distributed_sampler(loader):
            return f"{role.name}: shares out its data itself, left as it is."
        return f"{role.name}: left as it is, as the script knows its rank and may share out its data itself."
    taker = "island" if role.by_island else "worker"
    if isinstance(loader.dataset, IterableDataset):
        what, share = "a stream", f"one sample in {size} per {taker}"
    else:
        samples = samples_of(loader)
        shuffled = ", shuffled" if isinstance(inner_sampler(loader), DRAW_ONCE) else ""
        what = "samples" if samples is None else f"{samples:,} samples"
        what += shuffled
        about = "about " if samples is not None and samples % size else ""
        share = f"1 in {size} per {taker}" if samples is None else f"{about}{samples // size:,} per {taker}"
    if role.kind == TRAINS:
        left_out = left_out_of(loader, takers)
        drops = f"; drop_last leaves {left_out:,} of them out" if left_out else ""
        return f"{role.name} ({what}): trains, {share}{drops}."
    return f"{role.name} ({what}): evaluates, all of it."
