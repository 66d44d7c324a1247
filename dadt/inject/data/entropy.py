"""Seeds for generators that a script creates without a seed, such as `numpy.random.default_rng()`. In a script that
does not know of ranks, these seeds are derived from the job's seed instead of the system's entropy, so that all ranks
make the same random choices.

A seed depends on the job's seed, on the place in the script where the generator is created, and on how many were
created there before, so an extra generator in one rank or thread does not change the seeds elsewhere. Data pipelines
draw different numbers on each rank: generators made while a batch is read use the system's entropy, and those that a
data set owns are reseeded per rank when its first pass begins.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import os
import random
import sys
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.random import bit_generator
from torch.utils.data._utils import fetch

from dadt.inject.after_import import after_import
from dadt.inject.data.reachable import reachable
from dadt.inject.data.seed import Streams, mix, python_generator
from dadt.inject.failure import is_users
from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

GENERATORS = ("numpy", "random", "scipy", "sklearn", "torch", "uuid", "dadt")
"""Modules that create a generator on behalf of their caller. The place of creation is the nearest caller in any other
module."""
SWEEPS: tuple[str, ...] = ("optuna", "hyperopt", "skopt", "hydra", "hydra_plugins", "nevergrad", "ax", "bayes_opt")
SWEEPS += ("ConfigSpace", "smac", "cmaes", "cma", "ray.tune")
"""Libraries that choose the next trial of a hyperparameter search. All other libraries keep the system's entropy,
because they need it for unique names or for numbers that should differ between ranks, such as those of a simulated
environment."""
STORES: tuple[str, ...] = ("optuna.storages._rdb", "optuna.storages._redis", "optuna.storages._journal")
STORES += ("optuna.storages.journal", "hyperopt.mongoexp")
"""Modules that generate ids in a store which several processes may share. They keep the system's entropy, so that ids
stay unique."""
KEPT_GENERATORS = 64
"""Number of torch generators to remember for reseeding, since torch offers no way to find them later."""


class Entropy:
    """Computes seeds for generators in place of the system's entropy, and remembers which seeds it has given in this
    process."""

    def __init__(self, rank: Runtime, streams: Streams) -> None:
        self._rank, self._streams = rank, streams
        self._pid = os.getpid()
        self._asked: Counter[str] = Counter()
        """How many generators each place in the script has created without a seed."""
        self._scripts: set[int] = set()
        """Seeds given to the script's own code, not to a hyperparameter search library."""
        self._parted: set[tuple[int, str]] = set()
        self._random: WeakSet[random.Random] = WeakSet()
        """Instances of random.Random that the script itself has created, seeded by this object."""
        self._torch: deque[torch.Generator] = deque(maxlen=KEPT_GENERATORS)
        self._is_trained = self._is_scripts_data = False
        """`_is_trained`: whether a training step has ended. `_is_scripts_data`: whether the script chooses its training
        data with its own generators instead of a loader."""

    def seed(self, bits: int, frame: FrameType, more: bytes = b"") -> int | None:
        """Return a seed of `bits` bits for the generator that is created in this frame, or None if it should use the
        system's entropy. more: further bytes that change the seed."""
        if os.getpid() != self._pid or self._rank.script.is_distributed:
            return None
        if not (threading.current_thread() is threading.main_thread() or self._rank.script.on_training_thread):
            return None
        asker = asker_of(frame)
        is_scripts = asker is not None and _is_scripts(asker)
        if asker is None or not (is_scripts or sweeps(asker)) or (is_scripts and self._is_scripts_data):
            return None
        place = _place(asker)
        if not place:
            return None
        self._asked[place] += 1
        text = f"{max(self._rank.ranks.config.seed, 0)} {place} {self._asked[place]}".encode() + more
        value = int.from_bytes(hashlib.blake2b(text, digest_size=-(-bits // 8)).digest(), "big") >> -bits % 8
        if is_scripts:
            self._scripts.add(value)
        return value

    # Giving each rank random numbers of its own -------------------------------------------------------------

    def part_below(self, dataset: Any) -> None:
        """Reseed, at the start of a training pass, the generators that can be reached from the data set, so that they
        draw different numbers on each rank."""
        if self._scripts and os.getpid() == self._pid:
            for found in reachable(dataset):
                self._part(found)

    def trained(self, by_loader: bool) -> None:
        """Called after each step. by_loader: whether the first step's batch came from a loader that gives each rank its
        share. If not, the script chooses its data itself. Its generators are then reseeded per rank, because ranks that
        draw the same numbers would train on the same data.
        """
        if self._is_trained or os.getpid() != self._pid:
            return
        self._is_trained, self._is_scripts_data = True, not by_loader
        if by_loader:
            return
        if self._scripts:
            # Not isinstance, which would raise an error for a weak proxy whose object no longer exists.
            own = [each for each in gc.get_objects() if issubclass(type(each), np.random.BitGenerator)]
            for found in (*own, *self._random, *self._torch):
                self._part(found)

    def _part(self, found: Any) -> None:
        rank = self._rank.ranks.world.rank
        if isinstance(found, np.random.Generator):
            self._part(found.bit_generator)
        elif isinstance(found, np.random.RandomState):
            self._part(found._bit_generator)
        elif isinstance(found, np.random.BitGenerator):
            self._part_numpy(found)
        elif isinstance(found, torch.Generator):
            if found is not torch.default_generator and found.initial_seed() in self._scripts:
                found.manual_seed(mix(found.initial_seed(), rank))
        elif isinstance(found, random.Random) and found in self._random:
            self._random.discard(found)
            found.setstate(random.Random(mix(found.getrandbits(64), rank)).getstate())

    def _part_numpy(self, found: Any) -> None:
        if found is np.random.mtrand._rand._bit_generator:
            return
        sequence = getattr(found, "seed_seq", None)
        entropy, key = getattr(sequence, "entropy", None), (id(found), f"{sequence}")
        if isinstance(entropy, int) and entropy in self._scripts and key not in self._parted:
            self._parted.add(key)
            found.state = type(found)(np.random.SeedSequence(mix(key[1], self._rank.ranks.world.rank))).state

    # Generators that ask the operating system for a seed ----------------------------------------------------

    def install(self) -> None:
        """Patch the functions by which each library asks the system for entropy."""
        self._patch_numpy()
        self._patch_random()
        self._patch_torch()
        uuid.os = _Os(self._urandom)  # type: ignore[attr-defined]
        after_import("sklearn.utils.validation", self._patch_sklearn)

    def _patch_numpy(self) -> None:
        """Patch the function that gives all NumPy generators their entropy; SeedSequence calls it."""
        original = getattr(bit_generator, "randbits")  # noqa: B009 (its stubs have none)

        def randbits(bits: int) -> int:
            given = self.seed(bits, sys._getframe(1))
            return int(original(bits)) if given is None else given

        setattr(bit_generator, "randbits", randbits)  # noqa: B010

    def _patch_random(self) -> None:
        @replaces("seed", random.Random)
        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            given = self.seed(64, sys._getframe(1)) if a is None else None
            seed.__wrapped__(generator, a if given is None else given, version)
            if given is not None and given in self._scripts and generator is not python_generator:
                self._random.add(generator)
            elif self._random:
                self._random.discard(generator)

    def _patch_torch(self) -> None:
        original = torch.Generator.seed

        def seed(generator: torch.Generator) -> int:
            given = self.seed(63, sys._getframe(1))
            if given is None:
                return int(original(generator))
            generator.manual_seed(given)
            if given in self._scripts:
                self._torch.append(generator)
            return given

        @replaces("seed", torch, torch.random)
        def seed_all() -> int:
            given = self.seed(63, sys._getframe(1))
            if given is None:
                return int(seed_all.__wrapped__())
            torch.manual_seed(given)
            return given

        _set_method(torch.Generator, "seed", functools.update_wrapper(seed, original))

    def _urandom(self, size: int) -> bytes:
        """Replacement of `os.urandom` for `uuid`: the ids name folders of runs, or studies whose names decide which
        trials are pruned, so they have to be the same on all ranks."""
        frame = sys._getframe(1)
        asker = asker_of(frame)
        given = self.seed(8 * size, frame) if asker is not None and not _in(asker, STORES) else None
        return os.urandom(size) if given is None else given.to_bytes(size, "big")

    def _patch_sklearn(self, module: ModuleType) -> None:
        """Patch the function from which skopt gets its random generator, so that the generator has the same seed on all
        ranks. Otherwise it would be NumPy's global one, which differs between ranks once training has begun."""

        @replaces("check_random_state", module)
        def check_random_state(seed: Any) -> Any:
            asker = asker_of(sys._getframe(1))
            if (seed is None or seed is np.random) and asker is not None and sweeps(asker):
                given = self.seed(32, sys._getframe(1), self._streams.numpy_state())
                if given is not None:
                    return np.random.RandomState(given)
            return check_random_state.__wrapped__(seed)


class _Os:
    """Stand-in for the module `os`, with another `urandom`, that is given to the module `uuid`."""

    def __init__(self, urandom: Callable[[int], bytes]) -> None:
        self.urandom = urandom

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def asker_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the code that creates a generator, which is the nearest one outside the modules in
    GENERATORS."""
    while frame is not None and _in(frame, GENERATORS):
        frame = frame.f_back
    return frame


def sweeps(frame: FrameType) -> bool:
    return _in(frame, SWEEPS)


def _in(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = f"{frame.f_globals.get('__name__')}."
    return any(name.startswith(f"{each}.") for each in modules)


def _is_scripts(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "__main__" or _is_users(frame.f_code.co_filename)


_is_users = functools.lru_cache(maxsize=1024)(is_users)


def _place(asker: FrameType) -> str:
    """Return the place in the script where a generator is created, as text that is the same on all ranks. Returns an
    empty text while a batch of a map-style data set is read, since ranks read different batches. Each rank reads an
    iterable data set completely and in the same order.
    """
    lines, frame = [_line(asker)], asker.f_back
    while frame is not None:
        code = frame.f_code
        if code.co_filename == fetch.__file__ and not isinstance(
            frame.f_locals.get("self"), fetch._IterableDatasetFetcher
        ):
            return ""
        if _is_scripts(frame):
            lines.append(_line(frame))
        frame = frame.f_back
    return " ".join(lines)


def _line(frame: FrameType) -> str:
    """Return file name, function and line of a frame, without the folder, which may differ between hosts."""
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{code.co_name}:{frame.f_lineno}"  # noqa: PTH119 (no object for each)


def _set_method(kind: type, name: str, method: Callable[..., Any]) -> None:
    """Replace a method of a class that is written in C, whose attributes cannot be set from Python."""
    attributes = gc.get_referents(kind.__dict__)[0]
    attributes[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def install(rank: Runtime, streams: Streams) -> Entropy:
    """Create an Entropy, and patch the libraries to use its seeds if `streams` is enabled."""
    entropy = Entropy(rank, streams)
    if streams.enabled:
        entropy.install()
    return entropy
