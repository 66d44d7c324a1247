"""Iterators that a script gets in place of those of its DataLoaders."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass
from typing import Any, cast

from dadt.inject.data.seed import Streams
from dadt.inject.data.share import Share, StepShare
from dadt.inject.data.speed import Speeds
from dadt.inject.data.view import BatchView
from dadt.train.batch_weight import Pass
from dadt.train.runtime import Runtime

FEW_BATCHES = 3
"""A pass of fewer steps than this is judged only at its end, because a script may fetch all its batches before the
first backward. Otherwise, whether the script trains is judged at the last batch."""


@dataclass(eq=False)
class Order:
    """Sampler that wraps a loader's own sampler, so that it draws from the random stream that all ranks share, as it
    would in a single process."""

    source: Iterable[Any]
    streams: Streams
    draws_on: bool
    """Whether the source (the script's sampler) may draw random numbers for every index, not only for the first."""
    seen: Callable[[StepShare], None] | None = None
    """Function to call with each StepShare that the source yields before its indices are passed on; None if the source
    yields plain indices."""

    def __iter__(self) -> Iterator[Any]:
        with self.streams.shared():  # a custom sampler may draw random numbers as soon as its iterator is created
            source = iter(self.source)
        return self._walk(source)

    def _walk(self, source: Iterator[Any]) -> Iterator[Any]:
        swap = True
        while True:
            try:
                with self.streams.shared() if swap else nullcontext():
                    index = next(source)
            except StopIteration:
                return
            swap = self.draws_on
            if self.seen is not None:
                self.seen(index)
                index = index.index
            yield index

    def __len__(self) -> int:
        return len(cast(Any, self.source))

    def __getattr__(self, name: str) -> Any:
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


@dataclass(eq=False)
class Feed(BatchView):
    """Iterator over the batches of a map-style data set on a rank that trains on its share. Counts the samples of each
    batch when the script gets it."""

    share: Share
    runtime: Runtime
    streams: Streams
    name: str
    draws_on: InitVar[bool]
    prefetches: bool
    """Whether indices are drawn for worker processes before the script gets the batches of earlier ones."""
    steps: int
    """Number of steps of a pass; 0 if unknown."""
    over: Callable[[bool], None]
    """Called at the end of each pass, with True if the script has trained during the pass."""
    speeds: Speeds
    selection: Sequence[Any] = ()
    """What the data set selects from another one, equal on all ranks unless they have drawn it differently."""

    def __post_init__(self, draws_on: bool) -> None:
        self.order = Order(self.share, self.streams, draws_on, self._drawn)
        self._pieces: deque[StepShare] = deque()

    def begin(self, start: Callable[[], Iterator[Any]]) -> Feed:
        """Start a new pass. start: returns torch's iterator over `order`."""
        self._pieces.clear()
        self._batches, self._pass = 0, Pass(self.name)
        self._told = False
        self._training = self.runtime.optimizers.trains()
        self._before = (self.runtime.ranks.step, self.runtime.script.backwards)
        self.speeds.pass_begins()
        with self.streams.shared():
            self.batches = start()
        return self

    def __len__(self) -> int:
        return len(self.share)

    def __next__(self) -> Any:
        try:
            with self.streams.reading():
                data = next(self.batches)
        except StopIteration:
            self._end()
            raise
        except Exception:
            if self._pieces:  # empty if the sampler itself has failed, so that no samples were drawn
                self._take()
            raise
        piece = self._take()
        # Ranks compare their orders by a checksum of the first step's indices, and of those of a Subset. With different
        # orders, samples would be lost or repeated unnoticed.
        if not self._batches:
            self._pass.order = zlib.crc32(repr((piece.whole, self.selection)).encode())
        self._batches += 1
        if self._batches == self.steps >= FEW_BATCHES:
            self._look_back()  # the last batch; some scripts never request one more, which would end the pass
        if self._training or self.runtime.optimizers.trains():
            self.runtime.batches.drew(self._pass, piece.samples, self.share.nominal)
            self.speeds.drew(piece)
        return data

    def _drawn(self, piece: StepShare) -> None:
        if not self.prefetches:
            self._pieces.clear()
        self._pieces.append(piece)

    def _take(self) -> StepShare:
        return self._pieces.popleft()

    def _end(self) -> None:
        self.runtime.batches.pass_over(self._pass)
        self._look_back()

    def _look_back(self) -> None:
        """Call `over`, once in a pass, with True if the script has trained during the pass."""
        # A thread that prefetches batches may finish before the first step, so it cannot see whether the script trains.
        if self.runtime.script.on_training_thread and not self._told:
            self._told = True
            self.over((self.runtime.ranks.step, self.runtime.script.backwards) != self._before)


class Undecided(BatchView):
    """Iterator of a loader of which it is decided at the first batch whether it trains or evaluates. Scripts create
    iterators before they switch between training and evaluation, or even before they have an optimizer."""

    def __init__(
        self,
        runtime: Runtime,
        begin: Callable[[], Iterator[Any]],
        length: Callable[[], int],
        over: Callable[[bool], None],
    ) -> None:
        """over: called at the end of the pass, with True if a backward ran during the pass."""
        self._runtime = runtime
        self._begin = begin
        self._length = length
        self._over = over

    def __getattr__(self, name: str) -> Any:
        if name != "batches":
            return super().__getattr__(name)
        # `batches` is no property, because Python would treat an AttributeError in the script's sampler or data set as
        # a missing attribute.
        self._before = self._runtime.script.backwards
        self.batches = self._begin()
        return self.batches

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            self._over(self._runtime.script.backwards > self._before)
            raise

    def __len__(self) -> int:
        return self._length()
