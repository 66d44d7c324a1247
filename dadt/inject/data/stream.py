"""Divides iterable data sets: each rank reads every size-th sample, and all ranks make the same number of batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from dadt.errors import DadtError
from dadt.inject.data.seed import Streams
from dadt.inject.data.share import Spare, every_nth
from dadt.train.batch_weight import Pass
from dadt.train.runtime import Runtime

if TYPE_CHECKING:
    from dadt.train.loss.gathering import Gathering


class Split(NamedTuple):
    """Arguments with which `every_nth` divides a stream."""

    rank: int
    size: int
    block: int
    whole_blocks: bool


class EveryNth(IterableDataset[Any]):
    """A rank's part of an iterable data set.

    In all other respects it behaves like the script's own data set: reading or setting an attribute affects the
    script's data set, for example in a worker_init_fn through get_worker_info().dataset.
    """

    _OWN = frozenset({"_dadt_dataset", "_dadt_split"})

    def __init__(self, dataset: IterableDataset[Any], split: Split) -> None:
        self._dadt_dataset = dataset
        self._dadt_split = split

    def __iter__(self) -> Iterator[Any]:
        return every_nth(self._dadt_dataset, *self._dadt_split)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # pickle reads special attributes before `_dadt_dataset` is set
        return getattr(self._dadt_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dadt_dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return EveryNth, (self._dadt_dataset, self._dadt_split)


class EveryNthPipe(IterDataPipe[Any]):
    """A rank's part of a data pipe. The part is a data pipe, too, because torch shuffles and shards pipes as a
    graph."""

    def __init__(self, source: IterDataPipe[Any], split: Split) -> None:
        self.source = source
        self.split = split

    def __iter__(self) -> Iterator[Any]:
        return every_nth(self.source, *self.split)


def lives_on(dataset: IterableDataset[Any]) -> bool:
    """Return whether the next pass may continue where the current one stops, because the data set is its own iterator,
    or has an iterator as an attribute, such as an open file."""
    held = (dataset, *getattr(dataset, "__dict__", {}).values())
    return any(isinstance(each, Iterator) for each in held) and not isinstance(dataset, IterDataPipe)


def nth_of(dataset: IterableDataset[Any], split: Split) -> IterableDataset[Any]:
    return EveryNthPipe(dataset, split) if isinstance(dataset, IterDataPipe) else EveryNth(dataset, split)


class Counted(NamedTuple):
    """A collate function that also counts the samples of each batch, in this or a worker process. Returns (count,
    data)."""

    collate: Callable[[Any], Any]
    batches: bool

    def __call__(self, data: Any) -> tuple[int, Any]:
        if not self.batches:
            if isinstance(data, Spare):
                return 0, self.collate(data.sample)
            collated = self.collate(data)
            return first_dimension(collated), collated
        if isinstance(data[0], Spare):
            return 0, self.collate([data[0].sample])
        return len(data), self.collate(data)


def first_dimension(data: Any) -> int:
    """Return the length of the first tensor in nested data, which is the number of samples in a batch; 1 if there is no
    tensor."""
    if isinstance(data, torch.Tensor):
        return data.shape[0] if data.ndim else 1
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and data:
        return first_dimension(data[0])
    return 1


class Here(NamedTuple):
    """Whether a stream is read in this process, and whether the next pass may continue the stream."""

    in_process: bool
    """Whether the data set's code runs in this process, not in the loader's worker processes."""
    lives_on: bool
    """Whether the next pass may continue the stream where the current one stops."""


class Batch(NamedTuple):
    samples: int
    data: Any


@dataclass(eq=False)
class StreamFeed:
    """Iterator over the batches of an iterable data set (a stream), for a rank that trains on the data.

    While the script works on one batch, ranks ask each other which of them have another one. If the next pass continues
    the stream, they ask only when the script requests the next batch, since a batch fetched earlier would be lost to
    the next pass. A rank that has run out of batches repeats its last one, counted as 0 samples, until all ranks have
    run out.
    """

    batches: Iterator[tuple[int, Any]]
    runtime: Runtime
    streams: Streams
    name: str
    nominal: int
    """Number of samples in an ordinary batch, the same on all ranks."""
    steps: int | None
    """The length of the iterator; None if unknown."""
    here: Here
    over: Callable[[int], None]
    """Called at the end of a pass, with its number of steps."""

    def __post_init__(self) -> None:
        self._ranks = self.runtime.ranks
        self.reads_ahead = not (self.here.in_process and self.here.lives_on)
        self.together = self._ranks.together
        """Whether all ranks make the same number of batches. Otherwise (with `gossip`) each rank makes as many as its
        own data has."""
        self._given = 0
        self._pass = Pass(self.name)
        self._training = self.runtime.optimizers.trains()
        self._ahead: Batch | None = None
        self._last: Batch | None = None
        self._failure: Exception | None = None
        self._looked = False
        self._asked: Gathering | None = None
        self._ended = False

    def __iter__(self) -> StreamFeed:
        return self

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError(f"{self.name} has no length")
        return self.steps

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self.together:
            return self._next_own()
        self._check_thread()
        if not self._looked:
            self._look_ahead()
        having = self._having()
        if self._failure is not None:
            self._ended = True
            raise self._failure
        if not any(having):
            self._end()
        batch = self._ahead or self._repeat(having)
        self._last = batch._replace(samples=0)
        if self.reads_ahead:
            self._look_ahead()
        else:
            self._looked = False
        return self._give(batch)

    def _give(self, batch: Batch) -> Any:
        self._given += 1
        if self._training or self.runtime.optimizers.trains():
            self.runtime.batches.drew(self._pass, batch.samples, self.nominal)
        return batch.data

    def _check_thread(self) -> None:
        if not self.runtime.script.on_training_thread:
            raise DadtError(
                f"{self.name} is a stream that another thread ({threading.current_thread().name}) reads than the one"
                " that trains, which alone can ask whether other ranks have more of it: iterate over it there, with"
                " num_workers=1 or more to read ahead"
            )

    def _next_own(self) -> Any:
        batch = self._fetch()
        if batch is None:
            self._end()
        return self._give(batch)

    def _end(self) -> NoReturn:
        self._ended = True
        self.runtime.batches.pass_over(self._pass)
        self.over(self._given)
        raise StopIteration

    def _look_ahead(self) -> None:
        self._ahead = None
        try:
            self._ahead = self._fetch()
        except Exception as failure:  # noqa: BLE001  (belongs to the next batch, and is raised there)
            self._failure = failure
        self._looked, here = True, self.runtime.replay.under_way or self._ranks.alone
        self._asked = None if here else self._ask()

    def _ask(self) -> Gathering:
        return self._ranks.allgather(self.name, b"\x01" if self._ahead else b"\x00")

    def _having(self) -> list[bool]:
        """Return for each rank whether it has another batch; in a replay, or for a rank alone, only whether this rank
        has one."""
        if self.runtime.replay.under_way or self._ranks.alone:
            return [self._ahead is not None]
        if self._asked is None:
            self.runtime.claim()  # a replay ended after this rank fetched its batch, without asking others
            self._asked = self._ask()
        asked = self._asked
        self._ranks.wait(asked)
        return [flag == b"\x01" for flag in asked.lanes]

    def _fetch(self) -> Batch | None:
        while True:
            try:
                # every rank reads the whole stream, so random numbers used to read it must be the same on all ranks
                with self.streams.shared() if self.here.in_process else nullcontext():
                    batch = Batch(*next(self.batches))
            except StopIteration:
                return None
            if batch.samples:
                return batch
            self._last = self._last or batch

    def _repeat(self, having: list[bool]) -> Batch:
        if self._last is None:
            others = [rank for rank, has in enumerate(having) if has]
            raise DadtError(
                f"rank {self._ranks.world.rank} has no sample in {self.name} but ranks {others} have: its"
                " data set gives ranks different streams; if it shares out its data, run with --no-share"
                f" {self.name.rpartition('#')[2]}"
            )
        return self._last
