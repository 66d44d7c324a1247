"""Divides the data of DataLoaders: a loader that trains gives each rank its share, any other gives all ranks all data.

torch iterates over a *view* of the loader: an object of the same class with the same attributes, except for the sampler
(or the data set, if it is iterable). The loader itself is never changed, so it pickles and prints as without DADT.
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
from dadt.inject.after_import import after_import
from dadt.inject.data import shuffle, sums, workers_seed
from dadt.inject.data.division import Division, agree, alike, begun, left_out, missing
from dadt.inject.data.drawn import Drawn
from dadt.inject.data.entropy import Entropy
from dadt.inject.data.fastai_loader import FastaiLoaders
from dadt.inject.data.feed import Feed, Order, Undecided
from dadt.inject.data.replayed import Aside, ReplayedPass
from dadt.inject.data.role import ALONE, EVALUATES, TRAINS, LoaderRole, check_divisible, sentence
from dadt.inject.data.samplers import (
    Loader,
    draws_on,
    group_of,
    has_distributed_sampler,
    inner_sampler,
    sampler_slot,
    samples_of,
    selection,
    share_of,
)
from dadt.inject.data.schedule import Schedules
from dadt.inject.data.seed import Streams
from dadt.inject.data.share import Items, Share, Skipped, portion, stream_steps, unskipped
from dadt.inject.data.speed import Speeds
from dadt.inject.data.stream import Counted, Here, Split, StreamFeed, lives_on, nth_of
from dadt.inject.data.view import without_end
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

LISTED = 3
"""Maximum number of loaders for which the same sentence is printed, or that one sentence about lost ranks names."""


class Loaders:
    """All DataLoaders of this process, numbered by order of creation."""

    def __init__(self, runtime: Runtime, streams: Streams, entropy: Entropy) -> None:
        self.runtime = runtime
        self._ranks = runtime.ranks
        self._optimizers = runtime.optimizers
        self._islands = runtime.ranks.world.island_size > 0
        self.streams = streams
        self.entropy = entropy
        self.gives_shares = False
        """Whether a pass has begun in which each rank gets only its share."""
        self.roles: WeakKeyDictionary[Loader, LoaderRole] = WeakKeyDictionary()
        self._read: WeakKeyDictionary[Loader, dict[int, Any]] = WeakKeyDictionary()
        """One batch of each size for every loader, which a replay returns instead of reading all batches."""
        self.pid = os.getpid()
        self.original_iter: Callable[[Loader], Iterator[Any]] = DataLoader.__iter__
        self.original_len: Callable[[Loader], int] = DataLoader.__len__
        self._numbers = itertools.count(1)
        self._told: Counter[str] = Counter()
        self.schedules = Schedules()
        self.speeds = Speeds(runtime)
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
        # A final role need not be decided later, and a data pipe's iterator draws numbers that Drawn cannot repeat.
        if role.kind or isinstance(loader.dataset, IterDataPipe | MapDataPipe):
            return self._begin(loader, role)
        over = functools.partial(self._whole_over, role)
        with self.streams.shared():
            begin = functools.partial(self._begin, loader, role, Drawn(loader), self.streams.restored)
        return Undecided(self.runtime, begin, lambda: self.length(loader), over)

    def _begin(self, loader: Loader, role: LoaderRole, drawn: Drawn | None = None, restored: int = 0) -> Iterator[Any]:
        """Begin a pass. drawn: random numbers drawn when the script created the iterator. restored: `streams.restored`
        at that time."""
        role.drawn = drawn
        kind = self._decide(loader, role)
        if kind == ALONE:
            if self.streams.divided:
                role.drawn = None  # afterwards each rank seeds its worker processes differently
            return self._iterator(loader, role)
        # If gradients are disabled, each rank gets all data even of a loader that trains, as for an evaluation.
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
        return len(self._make_share(loader, role.begun))

    def _decide(self, loader: Loader, role: LoaderRole) -> str:
        """Return the role for this pass. If the decision is final, record it and report it to the user."""
        if role.kind:
            return role.kind
        kind, final = self.asked(role), True
        alone = self._alone(loader, role)
        if alone and not self._islands:
            kind = ALONE
        elif not kind or alone:
            # A pass before training begins may only collect statistics, so the role is not final.
            known, script = self._optimizers.registered > 0, self.runtime.script
            final = known and (self._optimizers.trains() or script.began)
            kind = TRAINS if known and self._optimizers.trains() else EVALUATES
            # Some scripts choose evaluation only after the first batch, so an unshuffled loader counts as evaluating.
            in_order = isinstance(inner_sampler(loader), SequentialSampler)
            role.is_doubted = kind == TRAINS and in_order and self._another_trains() and not script.fitting
            kind = EVALUATES if role.is_doubted else kind
            kind = ALONE if alone and final and kind == EVALUATES else kind
        if final:
            if kind == TRAINS:
                check_divisible(loader, role, self._ranks.config.batch, self._ranks.world.divisors)
            role.kind = kind
            role.views.clear()
            self._tell(sentence(loader, role, role.begun.shares, role.takers), role)
        return kind

    def _alone(self, loader: Loader, role: LoaderRole) -> bool:
        """Return whether the script may divide the loader's data itself. Also decides whether each island, instead of
        each rank, gets a share."""
        script = self.runtime.script
        alone = has_distributed_sampler(loader) or (
            not self.asked(role) and (script.is_distributed or script.divides_data)
        )
        role.by_island = self._islands and (alone or alike(self._optimizers))
        return alone

    def missing(self, lost: int) -> str:
        """Return a sentence that says what happens to the data of `lost` lost workers."""
        loaders = [(role, each) for each, role in self.roles.items() if isinstance(each, DataLoader)]
        trained = [(role.name, samples_of(each)) for role, each in loaders if role.kind == TRAINS]
        return missing(self.runtime, lost, trained[:LISTED])

    @property
    def shared(self) -> list[Any]:
        """Data sets of the loaders that train; each rank reads its share of these data sets."""
        return [loader.dataset for loader, role in list(self.roles.items()) if role.kind == TRAINS]

    def _another_trains(self) -> bool:
        return any(role.has_trained for role in self.roles.values())

    def _tell(self, sentence: str, role: LoaderRole, level: str = "info") -> None:
        """Print the sentence, at most LISTED times for equal ones, since some scripts make loaders in every epoch."""
        text = sentence.removeprefix(role.name)
        self._told[text] += 1
        if self._told[text] <= LISTED:
            self._ranks.say(sentence + " More like it are not listed." * (self._told[text] == LISTED), level)

    def asked(self, role: LoaderRole) -> str:
        """Return the role chosen for a loader by --share or --no-share, or an empty string."""
        if self._share is None or role.number in self._share:
            return TRAINS
        if self._no_share is None or role.number in self._no_share:
            return EVALUATES
        return ""

    def _guess(self, loader: Loader, role: LoaderRole) -> str:
        """Return the role that len(loader) assumes before the role is known: shuffled loaders train. If there are none,
        the first loader trains if its data set is iterable."""
        if self._alone(loader, role) and not self._islands:
            return ALONE
        if asked := self.asked(role):
            return asked
        if isinstance(loader.dataset, IterableDataset):
            return TRAINS if role.number == 1 and not any(map(self._shuffles, self.roles)) else EVALUATES
        return TRAINS if self._shuffles(loader) else EVALUATES

    def _shuffles(self, loader: Any) -> bool:
        if not isinstance(loader, DataLoader):  # a loader of fastai, which has an attribute `shuffle`
            return bool(loader.shuffle)
        return not isinstance(loader.dataset, IterableDataset) and not isinstance(
            inner_sampler(loader), SequentialSampler
        )

    def _divide(self, loader: Loader, role: LoaderRole) -> Division:
        """Return how a new pass is divided among ranks. If this has changed, worker processes start again."""
        division = role.begun if role.by_island else agree(self.runtime, role.name)
        if division.grows and not loader._auto_collation:
            self._ranks.say(f"{role.name} has no batches that could grow: lost workers' shares of it stay left out")
            division = left_out(self.runtime)
        if division.is_spare and isinstance(loader.dataset, IterableDataset):
            division = begun(self.runtime)  # otherwise this rank would read a whole stream for nothing
        if division != role.division:
            role.division, role.feed = division, None
            role.views.pop(False, None)
        return division

    def _make_share(self, loader: Loader, division: Division) -> Share:
        if loader.batch_sampler is None:
            self.speeds.leaves_equal(self.role(loader).name)
            return Items(loader.sampler, division.rank, division.readers)
        # A script that skips batches means steps, and a step has one batch per rank, so this skips steps.
        batch_sampler, steps = unskipped(loader.batch_sampler)
        if group_of(batch_sampler):
            self.speeds.leaves_equal(self.role(loader).name)
        divided, fractions = self._ranks.config.batch == "global", self.speeds.fractions
        divisors = [int(each) for each in self._ranks.world.divisors.split(",") if each]
        share = share_of(batch_sampler, *division, divided=divided, fractions=fractions, divisors=divisors)
        return Skipped(share, steps) if steps else share

    def _view(self, loader: Loader, role: LoaderRole, **changed: Any) -> Loader:
        """Return the loader's view, with the attributes `changed` replaced; later passes use the same object.

        The view stores a torch iterator of its own, so that persistent workers continue from one pass to the next.
        """
        view = role.views.get(role.gives_all)
        if view is None:
            view = role.views[role.gives_all] = object.__new__(without_end(type(loader)))
            view.__dict__["_iterator"] = None
        attributes = {name: value for name, value in loader.__dict__.items() if name != "_iterator"}
        view.__dict__.update(attributes, **changed)
        return view

    def _all(self, loader: Loader, role: LoaderRole) -> Iterator[Any]:
        """Begin a pass in which every rank gets all data, in an order drawn from the common random stream."""
        changed = {}
        if not isinstance(loader.dataset, IterableDataset):
            slot = sampler_slot(loader)
            changed[slot] = Order(getattr(loader, slot), self.streams, draws_on(loader))
        view = self._view(loader, role, **changed)
        with self.streams.shared():
            return self._iterator(view, role)

    def _iterator(self, view: Loader, role: LoaderRole) -> Iterator[Any]:
        """Return torch's iterator over the view, or, in a replay, an iterator that does not read most batches."""
        with nullcontext() if role.drawn is None else role.drawn.again():
            if not self.runtime.replay.under_way or isinstance(view.dataset, IterableDataset):
                return self.original_iter(view)
            return ReplayedPass(self.runtime, self.original_iter, view, self._read.setdefault(view, {}))

    def _map(self, loader: Loader, role: LoaderRole, division: Division) -> Iterator[Any]:
        feed = role.feed
        if feed is None:
            share, prefetches = self._make_share(loader, division), loader.num_workers > 0
            steps = self._shortened(loader, share)
            over, draws = functools.partial(self._over, role, steps), draws_on(loader)
            feed = Feed(share, self.runtime, self.streams, role.name, draws, prefetches, steps[0], over, self.speeds)
            feed.selection = selection(loader.dataset)
        if loader.persistent_workers and loader.num_workers:
            role.feed = feed  # torch uses one iterator object for all passes of persistent workers
        self.schedules.begin()
        changed = {
            sampler_slot(loader): feed.order,
            "in_order": True,  # the sample counts of batches are matched to the batches by their order
            "_dadt_rank": self._ranks.world.rank,
        }
        return feed.begin(lambda: self._iterator(self._view(loader, role, **changed), role))

    def _whole_over(self, role: LoaderRole, trained: bool) -> None:
        """Called after a pass of a loader whose role was undecided: if the script has trained in the pass, the loader
        counts as training from now on."""
        if trained and role.is_doubted:
            role.kind, role.is_doubted = TRAINS, False
            role.views.clear()
            self._ranks.say(f"{role.name} trains, too: it gives each worker its share from here on")

    def _shortened(self, loader: Loader, share: Share) -> tuple[int, int]:
        """Return the number of steps of a pass with and without DADT; both are 0 if the sampler has no length."""
        try:
            return len(share), self.original_len(loader)
        except (TypeError, NotImplementedError):
            return 0, 0

    def _over(self, role: LoaderRole, steps: tuple[int, int], trained: bool) -> None:
        """Called after a pass in which each rank had its share: warn if the pass had fewer steps than a learning rate
        schedule expects, or no training."""
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
            # If no other loader trains, the role stays undecided: the pass may have collected statistics, or summed up
            # one big loss.
            role.kind = EVALUATES if self._another_trains() else ""
            role.views.clear()
            if role.kind:
                remedy += "; it evaluates, and gives all of it from here on"
        self._ranks.say(f"{role.name} gave each worker its share in a pass without a backward; {remedy}", "warning")

    def _stream(self, loader: Loader, role: LoaderRole, division: Division) -> Iterator[Any]:
        rank, size, shares = division
        self.speeds.leaves_equal(role.name)
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
        with suppress(TypeError, NotImplementedError):  # ChainDataset's len() may fail
            steps = self._stream_steps(loader)
        nominal = -(-block // size) if loader._auto_collation else 1
        here = Here(loader.num_workers == 0, lives_on(dataset))
        over = functools.partial(self._stream_over, loader, role)
        return StreamFeed(batches, self.runtime, self.streams, role.name, nominal, steps, here, over)

    def _stream_over(self, loader: Loader, role: LoaderRole, steps: int) -> None:
        """Record, at the end of a pass over an iterable data set, that the pass had `steps` steps."""
        if loader.num_workers:
            with suppress(TypeError, NotImplementedError):
                role.steps = {len(cast(Sized, loader.dataset)): steps}

    def _stream_steps(self, loader: Loader) -> int:
        """Return the number of steps of a pass over an iterable data set: the number in the last complete pass, or else
        an estimate for which each of the loader's worker processes reads an equal part of the samples."""
        samples, takers = len(cast(Sized, loader.dataset)), self.role(loader).takers
        if (known := self.role(loader).steps.get(samples)) is not None:
            return known
        return stream_steps(
            samples, loader.batch_size or 1, bool(loader.drop_last), takers, workers=loader.num_workers or 1
        )


def install(runtime: Runtime, streams: Streams, entropy: Entropy) -> Loaders:
    """Patch DataLoader so that ranks share the data. Nothing is patched in a job of one rank."""
    loaders = Loaders(runtime, streams, entropy)
    if not runtime.hooked:
        return loaders
    loaders.schedules.install()
    shuffle.install(loaders)
    sums.install(runtime, loaders.roles.get)
    runtime.batches.missing = loaders.missing
    after_import("fastai.data.load", FastaiLoaders(loaders).patch)

    @replaces("__init__", DataLoader)
    def init(self: Loader, *args: Any, **kwargs: Any) -> None:
        init.__wrapped__(self, *args, **kwargs)
        if os.getpid() == loaders.pid:
            loaders.role(self)

    @replaces("__iter__", DataLoader)
    def iterate(self: Loader) -> Iterator[Any]:
        return loaders.iterate(self) if os.getpid() == loaders.pid else loaders.original_iter(self)

    @replaces("__len__", DataLoader)
    def length(self: Loader) -> int:
        return loaders.length(self) if os.getpid() == loaders.pid else loaders.original_len(self)

    workers_seed.install(streams, loaders.pid)
    return loaders
