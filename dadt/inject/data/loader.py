"""DataLoaders of an unmodified script: one that trains gives each rank its share, any other everything.

A loader is iterated through a *view*: an object of the loader's class and attributes with another sampler (or
data set, if iterable) in it. The loader itself is never changed, so it pickles, prints and compares as ever.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from contextlib import nullcontext, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, MapDataPipe, SequentialSampler

from dadt.config.check import loader_numbers
from dadt.errors import ConfigError
from dadt.inject.after_import import after_import
from dadt.inject.data import shuffle, sums, workers_seed
from dadt.inject.data.division import Division, agree, begun, left_out, missing
from dadt.inject.data.drawn import Drawn
from dadt.inject.data.entropy import Entropy
from dadt.inject.data.fastai_loader import FastaiLoaders
from dadt.inject.data.feed import Feed, Order, Undecided
from dadt.inject.data.replayed import Aside, ReplayedPass
from dadt.inject.data.role import ALONE, EVALUATES, TRAINS, LoaderRole, sentence
from dadt.inject.data.samplers import (
    Loader,
    draws_on,
    has_distributed_sampler,
    inner_sampler,
    sampler_slot,
    samples_of,
    share_of,
)
from dadt.inject.data.schedule import Schedules
from dadt.inject.data.seed import Streams
from dadt.inject.data.share import Items, Share, Skipped, portion, stream_steps, unskipped
from dadt.inject.data.stream import Counted, Here, Split, StreamFeed, lives_on, nth_of
from dadt.inject.data.view import without_end
from dadt.train.runtime import Runtime

LISTED = 3
"""Most loaders named to the user: of those with one sentence, and of those that train when ranks were lost."""


class Loaders:
    """All DataLoaders of this process, numbered by order of creation."""

    def __init__(self, runtime: Runtime, streams: Streams, entropy: Entropy) -> None:
        self.runtime = runtime
        self._ranks = runtime.ranks
        self._optimizers = runtime.optimizers
        self.streams = streams
        self.entropy = entropy
        self.gives_shares = False
        """A pass has begun in which each rank has its share."""
        self.roles: WeakKeyDictionary[Loader, LoaderRole] = WeakKeyDictionary()
        self._read: WeakKeyDictionary[Loader, dict[int, Any]] = WeakKeyDictionary()
        """A batch of each size, in a replay."""
        self.pid = os.getpid()
        self.original_iter: Callable[[Loader], Iterator[Any]] = DataLoader.__iter__
        self.original_len: Callable[[Loader], int] = DataLoader.__len__
        self._numbers = itertools.count(1)
        self._told: Counter[str] = Counter()
        self.schedules = Schedules()
        self._share = loader_numbers("--share", runtime.ranks.config.share)
        self._no_share = loader_numbers("--no-share", runtime.ranks.config.no_share)

    def role(self, loader: Loader) -> LoaderRole:
        found = self.roles.get(loader)
        if found is None:
            found = self.roles[loader] = LoaderRole(next(self._numbers), self.runtime)
        return found

    def iterate(self, loader: Loader) -> Iterator[Any]:
        with self.runtime.replay.aside():
            found = self._iterate(loader)
        return found if self.runtime.replay.aside is nullcontext else Aside(self.runtime, found)

    def _iterate(self, loader: Loader) -> Iterator[Any]:
        if self.runtime.script.explicit:
            return self.original_iter(loader)
        role = self.role(loader)
        # A data pipe draws more than the base seed as soon as there is an iterator.
        if role.kind or isinstance(loader.dataset, IterDataPipe | MapDataPipe):
            return self._begin(loader, role)
        over = functools.partial(self._whole_over, role)
        with self.streams.shared():
            begin = functools.partial(self._begin, loader, role, Drawn(loader), self.streams.restored)
        return Undecided(self.runtime, begin, lambda: self.length(loader), over)

    def _begin(self, loader: Loader, role: LoaderRole, drawn: Drawn | None = None, restored: int = 0) -> Iterator[Any]:
        """A pass. drawn: by its iterator, if that was made before, when streams had been restored so often."""
        role.drawn = drawn
        kind = self._decide(loader, role)
        if kind == ALONE:
            if self.streams.divided:
                role.drawn = None  # each rank's workers have a seed of their own
            return self._iterator(loader, role)
        # A loader that trains may be evaluated as well, as a whole.
        role.gives_all = kind == EVALUATES or not (torch.is_grad_enabled() or self.asked(role))
        if role.gives_all:
            return self._all(loader, role)
        self.runtime.claim()
        self.streams.split()
        if self.streams.restored != restored:
            role.drawn = None
        self.gives_shares = True
        self.entropy.part_below(loader.dataset)
        division = self._divide(loader, role)
        stream = isinstance(loader.dataset, IterableDataset)
        return self._stream(loader, role, division) if stream else self._map(loader, role, division)

    def length(self, loader: Loader) -> int:
        self.schedules.length_asked = True
        role = self.role(loader)
        kind = role.kind or self._guess(loader, role)
        if kind != TRAINS or role.gives_all:
            return self.original_len(loader)
        if isinstance(loader.dataset, IterableDataset):
            return self._stream_steps(loader)
        return len(self._make_share(loader, begun(self.runtime)))

    def _decide(self, loader: Loader, role: LoaderRole) -> str:
        """The role for this pass. If it is for good, it is fixed, and the user is told."""
        if role.kind:
            return role.kind
        kind, final = self.asked(role), True
        if has_distributed_sampler(loader) or (not kind and self.runtime.script.is_distributed):
            kind = ALONE
        elif not kind:
            # A pass before training may be one for statistics: it decides nothing.
            known, script = self._optimizers.registered > 0, self.runtime.script
            final = known and (self._optimizers.trains() or script.began)
            kind = TRAINS if known and self._optimizers.trains() else EVALUATES
            # Some choose evaluation only once they have a batch: what is in order beside data that trains, is for that.
            in_order = isinstance(inner_sampler(loader), SequentialSampler)
            role.is_doubted = kind == TRAINS and in_order and self._another_trains() and not script.fitting
            kind = EVALUATES if role.is_doubted else kind
        if final:
            if kind == TRAINS:
                self._check(loader, role)
            role.kind = kind
            role.views.clear()
            self._tell(sentence(loader, role, self._ranks.world.world_size, self._takers), role)
        return kind

    def missing(self, lost: int) -> str:
        """Says what becomes of the data of `lost` lost workers, as `Runtime.missing`."""
        loaders = [(role, each) for each, role in self.roles.items() if isinstance(each, DataLoader)]  # not fastai's
        trained = [(role.name, samples_of(each)) for role, each in loaders if role.kind == TRAINS]
        return missing(self.runtime, lost, trained[:LISTED])

    @property
    def shared(self) -> list[Any]:
        """Data sets of which each rank has its share."""
        return [loader.dataset for loader, role in list(self.roles.items()) if role.kind == TRAINS]

    def _another_trains(self) -> bool:
        return any(role.has_trained for role in self.roles.values())

    def _tell(self, sentence: str, role: LoaderRole, level: str = "info") -> None:
        """Print the sentence; of loaders alike, as made again in every epoch, only for the first LISTED."""
        text = sentence.removeprefix(role.name)
        self._told[text] += 1
        if self._told[text] <= LISTED:
            self._ranks.say(sentence + " More like it are not listed." * (self._told[text] == LISTED), level)

    def asked(self, role: LoaderRole) -> str:
        """The choice of --share and --no-share for a loader."""
        if self._share is None or role.number in self._share:
            return TRAINS
        if self._no_share is None or role.number in self._no_share:
            return EVALUATES
        return ""

    def _guess(self, loader: Loader, role: LoaderRole) -> str:
        """The role that len() assumes before it is fixed: what shuffles trains, else the first loader if a stream."""
        if has_distributed_sampler(loader):
            return ALONE
        if asked := self.asked(role):
            return asked
        if self.runtime.script.is_distributed:
            return ALONE
        if isinstance(loader.dataset, IterableDataset):
            return TRAINS if role.number == 1 and not any(map(self._shuffles, self.roles)) else EVALUATES
        return TRAINS if self._shuffles(loader) else EVALUATES

    def _shuffles(self, loader: Any) -> bool:
        if not isinstance(loader, DataLoader):  # one of fastai's
            return bool(loader.shuffle)
        return not isinstance(loader.dataset, IterableDataset) and not isinstance(
            inner_sampler(loader), SequentialSampler
        )

    def _check(self, loader: Loader, role: LoaderRole) -> None:
        """Raises ConfigError if --batch global cannot divide this loader's batches."""
        size = self._ranks.shares
        if self._ranks.config.batch != "global":
            return
        if loader.batch_size is not None and loader.batch_size < size:
            raise ConfigError(
                f"--batch global: {role.name} has batches of {loader.batch_size}, which cannot be divided"
                f" among {size} workers; use fewer workers, larger batches or --batch per-rank"
            )
        if not loader._auto_collation:
            raise ConfigError(
                f"--batch global: {role.name} has no batch size that could be divided among {size} workers;"
                f" use --batch per-rank, or --no-share {role.number}"
            )

    def _divide(self, loader: Loader, role: LoaderRole) -> Division:
        """The division of the pass that begins. Persistent workers start again if it differs from the last pass's."""
        division = agree(self.runtime, role.name)
        if division.grows and not loader._auto_collation:
            self._ranks.say(f"{role.name} has no batches that could grow: lost workers' shares of it stay left out")
            division = left_out(self.runtime)
        if division != role.division:
            role.division, role.feed = division, None
            role.views.pop(False, None)
        return division

    def _make_share(self, loader: Loader, division: Division) -> Share:
        if loader.batch_sampler is None:
            return Items(loader.sampler, division.rank, division.readers)
        # A script counts the steps that it has taken, each of which was all ranks'.
        batch_sampler, steps = unskipped(loader.batch_sampler)
        share = share_of(batch_sampler, *division, divided=self._ranks.config.batch == "global")
        return Skipped(share, steps) if steps else share

    def _view(self, loader: Loader, role: LoaderRole, **changed: Any) -> Loader:
        """An object like the loader but for the attributes `changed`; the same one in every pass of a role.

        It keeps its own torch iterator, so that persistent workers persist.
        """
        view = role.views.get(role.gives_all)
        if view is None:
            view = role.views[role.gives_all] = object.__new__(without_end(type(loader)))
            view.__dict__["_iterator"] = None
        attributes = {name: value for name, value in loader.__dict__.items() if name != "_iterator"}
        view.__dict__.update(attributes, **changed)
        return view

    def _all(self, loader: Loader, role: LoaderRole) -> Iterator[Any]:
        """Everything, on every rank, drawn from the shared stream."""
        changed = {}
        if not isinstance(loader.dataset, IterableDataset):
            slot = sampler_slot(loader)
            changed[slot] = Order(getattr(loader, slot), self.streams, draws_on(loader))
        view = self._view(loader, role, **changed)
        with self.streams.shared():
            return self._iterator(view, role)

    def _iterator(self, view: Loader, role: LoaderRole) -> Iterator[Any]:
        """torch's, or one that leaves reading out."""
        with nullcontext() if role.drawn is None else role.drawn.again():
            if not self.runtime.replay.under_way or isinstance(view.dataset, IterableDataset):
                return self.original_iter(view)
            return ReplayedPass(self.runtime, self.original_iter, view, self._read.setdefault(view, {}))

    def _map(self, loader: Loader, role: LoaderRole, division: Division) -> Iterator[Any]:
        feed = role.feed
        if feed is None:
            share, prefetches = self._make_share(loader, division), loader.num_workers > 0
            steps = self._shortened(loader, share)
            over = functools.partial(self._over, role, steps)
            draws = draws_on(loader)
            feed = Feed(share, self.runtime, self.streams, role.name, draws, prefetches, steps[0], over)
        if loader.persistent_workers and loader.num_workers:
            role.feed = feed  # torch's iterator is one object for all passes, and so is ours
        self.schedules.begin()
        changed = {
            sampler_slot(loader): feed.order,
            "in_order": True,  # what a batch counts is matched to it by order
            "_dadt_rank": self._ranks.world.rank,
        }
        return feed.begin(lambda: self._iterator(self._view(loader, role, **changed), role))

    def _whole_over(self, role: LoaderRole, trained: bool) -> None:
        """A pass has ended for which the role was undecided."""
        if trained and role.is_doubted:
            role.kind, role.is_doubted = TRAINS, False
            role.views.clear()
            self._ranks.say(f"{role.name} trains, too: it gives each worker its share from here on")

    def _shortened(self, loader: Loader, share: Share) -> tuple[int, int]:
        """The steps of a pass, and how many they would be without DADT; none where the sampler has no length."""
        try:
            return len(share), self.original_len(loader)
        except (TypeError, NotImplementedError):
            return 0, 0

    def _over(self, role: LoaderRole, steps: tuple[int, int], trained: bool) -> None:
        """A pass in which each rank had its share has ended."""
        role.has_trained |= trained
        if trained:
            shared, alone = steps
            if shared < alone and self.schedules.by_step():
                self._tell(
                    f"{role.name}: {shared} steps a pass in place of {alone}: a schedule computed from the data set's"
                    f" size would be too long; use len(loader), or --batch global, which keeps {alone} steps.",
                    role,
                    "warning",
                )
            return
        remedy = "to give all of it, begin such a pass under torch.no_grad()"
        if not (role.has_trained or self.asked(role)):
            # Where no other trains, it may have been one for statistics, or for a loss of all batches together.
            role.kind = EVALUATES if self._another_trains() else ""
            role.views.clear()
            if role.kind:
                remedy += "; it evaluates, and gives all of it from here on"
        self._ranks.say(f"{role.name} gave each worker its share in a pass without a backward; {remedy}", "warning")

    def _stream(self, loader: Loader, role: LoaderRole, division: Division) -> Iterator[Any]:
        rank, size, shares = division
        divided = self._ranks.config.batch == "global"
        batch_size, drop_last = loader.batch_size or 1, bool(loader.drop_last)
        block = batch_size if divided else batch_size * shares
        split = Split(rank, size, block, drop_last)
        dataset = cast("IterableDataset[Any]", loader.dataset)
        changed: dict[str, Any] = {
            "dataset": nth_of(dataset, split),
            "collate_fn": Counted(loader.collate_fn, loader._auto_collation),
        }
        if divided or division.grows:
            mine = len(portion(block, rank, size))
            changed["batch_sampler"] = BatchSampler(loader.sampler, mine, drop_last)
        with self.streams.shared():
            batches = self._iterator(self._view(loader, role, **changed), role)
        steps = None
        with suppress(TypeError, NotImplementedError):  # a ChainDataset's method, where a part has no length
            steps = self._stream_steps(loader)
        nominal = -(-block // size) if loader._auto_collation else 1
        here = Here(loader.num_workers == 0, lives_on(dataset))
        over = functools.partial(self._stream_over, loader, role)
        return StreamFeed(batches, self.runtime, self.streams, role.name, nominal, steps, here, over)

    def _stream_over(self, loader: Loader, role: LoaderRole, steps: int) -> None:
        """A pass over a stream has ended after `steps` steps."""
        if loader.num_workers:
            with suppress(TypeError, NotImplementedError):
                role.steps = {len(cast(Sized, loader.dataset)): steps}

    def _stream_steps(self, loader: Loader) -> int:
        """As many as the last whole pass had; before that, as many as there are if each of the loader's workers gives
        its part of the samples."""
        samples = len(cast(Sized, loader.dataset))
        if (known := self.role(loader).steps.get(samples)) is not None:
            return known
        parts = [
            len(portion(samples, worker, workers)) for workers in [loader.num_workers or 1] for worker in range(workers)
        ]
        return sum(stream_steps(part, loader.batch_size or 1, bool(loader.drop_last), self._takers) for part in parts)

    @property
    def _takers(self) -> int:
        """Ranks that take a batch of their own in each step."""
        return 1 if self._ranks.config.batch == "global" else self._ranks.shares


def install(runtime: Runtime, streams: Streams, entropy: Entropy) -> Loaders:
    """Patch DataLoader. In a world of one, nothing is changed at all."""
    loaders = Loaders(runtime, streams, entropy)
    if not runtime.hooked:
        return loaders
    loaders.schedules.install()
    shuffle.install(loaders)
    sums.install(runtime, loaders.roles.get)
    runtime.batches.missing = loaders.missing
    after_import("fastai.data.load", FastaiLoaders(loaders).patch)
    original_init = DataLoader.__init__

    @functools.wraps(original_init)
    def __init__(self: Loader, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if os.getpid() == loaders.pid:
            loaders.role(self)

    @functools.wraps(DataLoader.__iter__)
    def __iter__(self: Loader) -> Iterator[Any]:
        return loaders.iterate(self) if os.getpid() == loaders.pid else loaders.original_iter(self)

    @functools.wraps(DataLoader.__len__)
    def __len__(self: Loader) -> int:
        return loaders.length(self) if os.getpid() == loaders.pid else loaders.original_len(self)

    for name, patched in (("__init__", __init__), ("__iter__", __iter__), ("__len__", __len__)):
        setattr(DataLoader, name, patched)
    workers_seed.install(streams, loaders.pid)
    return loaders
