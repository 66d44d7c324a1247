"""One start, then one random stream per rank and one that all ranks share.

Before the script runs, every rank seeds torch, numpy and random alike, so models, splits and initial values
agree. When training begins, the state of the global generators becomes the *shared stream*, from which
samplers and DataLoader base seeds go on drawing in the single process's order, and the global generators are
reseeded per rank, so that dropout and augmentation differ between ranks, reproducibly.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dadt.inject.rank import Rank

REMEMBERED_STATES = 64
"""Random states handed to the script for which the shared stream's state at that moment is kept."""


class State(NamedTuple):
    """The global generators of a process that samplers draw from."""

    torch: torch.Tensor
    numpy: Any
    random: Any

    @classmethod
    def capture(cls) -> State:
        return cls(torch.default_generator.get_state(), np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.random)

    def plain(self) -> dict[str, Any]:
        """The state as plain values and tensors, for a checkpoint."""
        kind, keys, *rest = self.numpy
        version, words, gauss = self.random
        return {
            "torch": self.torch.clone(),
            "numpy": [kind, torch.from_numpy(keys.view(np.uint8).copy()), *rest],
            "random": [version, torch.from_numpy(np.array(words, np.uint32).view(np.uint8)), gauss],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> State:
        kind, keys, *rest = plain["numpy"]
        version, words, gauss = plain["random"]
        words, keys = (each.cpu().numpy().view(np.uint32) for each in (words, keys))
        return cls(plain["torch"].cpu(), (kind, keys, *rest), (version, tuple(words.tolist()), gauss))

    def seed(self) -> int:
        """A seed that depends on all of the state."""
        text = self.torch.numpy().tobytes() + repr(self.random).encode()
        text += b"".join(np.asarray(field).tobytes() for field in self.numpy[1:])
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def mix(seed: int, rank: int) -> int:
    """A seed of rank's own, in [0, 2**56)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{rank}".encode(), digest_size=7).digest(), "big")


def seed_all(seed: int, manual_seed: Callable[[int], Any] = torch.manual_seed) -> None:
    """Seed torch (every device), numpy and random."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    manual_seed(seed)


class Ahead(Protocol):
    """A rank's `Parting` from the others, in a script that calls `dadt.init`."""

    @property
    def ahead(self) -> bool: ...

    def part(self) -> None: ...
    def waive(self) -> None: ...


class Resumed(NamedTuple):
    """The streams of a checkpoint, until they part again."""

    shared: State
    own: State | None
    """This rank's, where the checkpoint is its own."""


class Streams:
    """The shared stream and the rank's. Before `split` the global generators are both.

    In a child process (a DataLoader's worker), and with `enabled` False, everything here does nothing.
    """

    def __init__(self, rank: int, *, enabled: bool = True) -> None:
        self.rank = rank
        self.enabled = enabled
        self._shared: State | None = None
        self._left: State | None = None
        """The rank's own state when it last rejoined the shared stream."""
        self._drawing = False
        self.seeded = False
        """The script has called torch.manual_seed."""
        self._resumed: Resumed | None = None
        self.seeded_anew = False
        """The same, after a checkpoint was loaded."""
        self.parting: Ahead | None = None
        self._remembered: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._manual_seed: Callable[[int], Any] = torch.manual_seed

    @property
    def divided(self) -> bool:
        """Whether ranks have streams of their own by now (always False in a child process)."""
        return self._shared is not None and os.getpid() == self._pid

    def split(self) -> None:
        """Give this rank a stream of its own from here on. The first call counts."""
        if not self.enabled or self._shared is not None or os.getpid() != self._pid:
            return
        with self._lock:
            self._shared = State.capture()
            resumed, self._resumed = self._resumed, None
            if resumed is not None:
                # Seeds that the script has set since are for the shared stream.
                anew = self._shared.torch if self.seeded_anew else resumed.shared.torch
                self._shared = resumed.shared._replace(torch=anew)
            seed_all(mix(self._shared.seed(), self.rank), self._manual_seed)
            if resumed is not None and resumed.own is not None and not self.seeded_anew:
                resumed.own.restore()

    def state(self) -> dict[str, Any]:
        """The state of both streams, for a checkpoint; nothing before they have parted."""
        if not self.divided:
            return {}
        assert self._shared is not None
        return {"shared": self._shared.plain(), "own": State.capture().plain()}

    def load_state(self, shared: dict[str, Any], own: dict[str, Any] | None, *, seeded_anew: bool) -> None:
        """Part from here: at the next `split`, or not at all where the streams have parted already (a script that
        goes back to its best weights goes on with its data). own: this rank's stream; else a new one."""
        if self.enabled and not self.divided:
            self._resumed = Resumed(State.from_plain(shared), None if own is None else State.from_plain(own))
            self.seeded_anew = seeded_anew

    def place(self, shared: State) -> None:
        """The shared stream is now what it was at another time."""
        self._shared = shared

    def part_anew(self, shared: State) -> None:
        """The shared stream is this one, and the rank's own begins from it."""
        self._shared = shared
        seed_all(mix(shared.seed(), self.rank), self._manual_seed)

    def _rejoin(self) -> None:
        """The script starts anew from a seed: data, splits and weights that it now draws must agree on all ranks.
        Until `split` (the next training batch or forward) the global generators are the shared stream again."""
        assert self._shared is not None
        self._left = State.capture()
        self._shared.restore()
        self._shared = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, the global generators of torch (CPU), numpy and random are the shared stream."""
        if not self.divided:
            yield
            return
        with self._lock:
            if self._drawing:
                yield
                return
            mine = State.capture()
            assert self._shared is not None
            self._shared.restore()
            self._drawing = True
            try:
                yield
            finally:
                self._drawing = False
                self._shared = State.capture()
                mine.restore()

    def install(self) -> None:
        """Let the script's own seeding reach both streams."""
        self._manual_seed = torch.manual_seed
        for name, patched in (
            ("manual_seed", self._patched_manual_seed()),
            ("get_rng_state", self._patched_get(torch.get_rng_state)),
            ("set_rng_state", self._patched_set(torch.set_rng_state)),
        ):
            functools.update_wrapper(patched, getattr(torch, name))
            setattr(torch, name, patched)
            setattr(torch.random, name, patched)

    def _patched_manual_seed(self) -> Callable[..., Any]:
        original = self._manual_seed

        def manual_seed(seed: int) -> Any:
            self.seeded = True
            if not self.divided:
                self.seeded_anew = True
                return original(seed)
            with self._lock:
                if self._drawing:  # by a sampler: it means the shared stream, which is in place now
                    return original(seed)
                self._rejoin()
                return original(seed)

        return manual_seed

    def _patched_get(self, original: Callable[[], torch.Tensor]) -> Callable[..., Any]:
        """A state that the script keeps and sets again (torch.random.fork_rng does) stands for both streams:
        else `with fork_rng(): manual_seed(0)` in every epoch would shuffle every epoch alike."""

        def get_rng_state() -> torch.Tensor:
            state = original()
            if self.divided and not self._drawing:
                assert self._shared is not None
                self._remembered[state.numpy().tobytes()] = self._shared.torch
                while len(self._remembered) > REMEMBERED_STATES:
                    self._remembered.popitem(last=False)
            return state

        return get_rng_state

    def _patched_set(self, original: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
        def set_rng_state(new_state: torch.Tensor) -> None:
            original(new_state)
            kept = self._remembered.get(new_state.numpy().tobytes())
            if kept is None or self._drawing or os.getpid() != self._pid:
                return
            if self._shared is not None:
                self._shared = self._shared._replace(torch=kept)
            elif self._left is not None:  # seeded in between, as under fork_rng: the rank's streams go on
                self._shared = State.capture()._replace(torch=kept)
                np.random.set_state(self._left.numpy)
                random.setstate(self._left.random)

        return set_rng_state


def install(runtime: Rank) -> Streams:
    """Seed this process before the script runs, and give the streams that `split` divides later.

    A world of one is left exactly as plain python leaves it.
    """
    streams = Streams(runtime.world.rank, enabled=runtime.config.seeding and not runtime.alone)
    if streams.enabled:
        seed_all(max(runtime.config.seed, 0))
        streams.install()
    return streams
