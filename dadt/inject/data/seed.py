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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dadt.train.runtime import Runtime

_seed_numpy, _set_numpy, _set_random = np.random.seed, np.random.set_state, random.setstate
"""NumPy's and Python's own functions, kept before they are replaced by ones that note the script's calls."""
python_generator = random.seed.__self__  # type: ignore[attr-defined]
"""The generator of the functions of the module `random`."""
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
        _set_numpy(self.numpy)
        _set_random(self.random)

    def having(self, other: State, names: Iterable[str]) -> State:
        """This state, but with the generators of these names as in the other."""
        return self._replace(**{name: getattr(other, name) for name in names})

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
    python_generator.seed(seed)
    _seed_numpy(seed % 2**32)
    manual_seed(seed)


def _seed_python(*args: Any, **kwargs: Any) -> None:
    """The method as it is by now."""
    python_generator.seed(*args, **kwargs)


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
        self.seeded_anew: set[str] = set()
        """The generators that the script has seeded since it loaded a checkpoint, by the names of State."""
        self.restored = 0
        """How often the shared stream has become that of another time."""
        self._has_parted = False
        self._joined: dict[str, Any] = {}
        """Generators that the script has seeded by `random.seed` or `numpy.random.seed` since ranks have streams of
        their own, and the rank's state before. Until `split` the global one is the shared one, too."""
        self._reader = 0
        """The thread that reads a batch of this rank's share."""
        self.parting: Ahead | None = None
        self.undivided: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context that `shared` uses if ranks have no streams of their own."""
        self._remembered: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._manual_seed: Callable[[int], Any] = torch.manual_seed

    @property
    def divided(self) -> bool:
        """Whether ranks have streams of their own by now (always False in a child process)."""
        return self._shared is not None and os.getpid() == self._pid

    def numpy_state(self) -> bytes:
        """What NumPy's global generator would draw from, the same on all ranks."""
        state: Any = self._common.numpy if self.divided else np.random.get_state()
        return b"".join(np.asarray(field).tobytes() for field in state[1:])

    def split(self) -> None:
        """Give this rank a stream of its own from here on. Cheap where it has one."""
        if not self.enabled or (self._shared is not None and not self._joined) or os.getpid() != self._pid:
            return
        if self._drawing:  # within a step that evaluates by itself
            return
        with self._lock:
            own: State | None = State.capture()
            anew = set(self._joined)
            if self._shared is not None:
                self._shared = self._common
            else:
                self._shared, own, anew = self._begun()
            self._joined.clear()
            seed_all(mix(self._shared.seed(), self.rank), self._manual_seed)
            if own is not None and "torch" not in anew:
                own.having(State.capture(), anew).restore()
            self._has_parted = True

    def _begun(self) -> tuple[State, State | None, set[str]]:
        """The shared stream, the rank's own if there is one, and the generators that the script has seeded since."""
        current, resumed, self._resumed = State.capture(), self._resumed, None
        if resumed is None:
            return current, None, set()
        self.restored += "torch" not in self.seeded_anew
        # Seeds that the script has set since are for the shared stream.
        return resumed.shared.having(current, self.seeded_anew), resumed.own, self.seeded_anew

    @property
    def _common(self) -> State:
        """The shared stream, with what the script has seeded since."""
        if self._drawing:
            return State.capture()
        assert self._shared is not None
        return self._shared.having(State.capture(), self._joined) if self._joined else self._shared

    def state(self) -> dict[str, Any]:
        """The state of both streams, for a checkpoint; nothing before they have parted."""
        if not self.divided:
            return {}
        return {"shared": self._common.plain(), "own": State.capture().plain()}

    def loaded(self) -> None:
        """The script has loaded a checkpoint: seeds from before give way to it."""
        self.seeded_anew = set()

    def load_state(self, shared: dict[str, Any], own: dict[str, Any] | None, seeded_anew: Iterable[str]) -> None:
        """Part from here: at the next `split`, or not at all where the streams have parted before (a script that
        goes back to its best weights goes on with its data). own: this rank's stream; else a new one."""
        if self.enabled and not self._has_parted:
            self._resumed = Resumed(State.from_plain(shared), None if own is None else State.from_plain(own))
            self.seeded_anew = set(seeded_anew)

    def place(self, shared: State) -> None:
        """The shared stream is now what it was at another time."""
        self._shared = shared
        self._joined.clear()
        self.restored += 1

    def part_anew(self, shared: State) -> None:
        """The shared stream is this one, and the rank's own begins from it."""
        self.place(shared)
        seed_all(mix(shared.seed(), self.rank), self._manual_seed)

    def _rejoin(self) -> None:
        """The script starts again from a seed: data, splits and weights that it now draws must agree on all ranks.
        Until `split` (the next training batch or forward) the global generators are the shared stream again."""
        common, self._left = self._common, State.capture()
        common.restore()
        self._shared = None
        self._joined.clear()

    @contextmanager
    def shared(self, *, only_torch: bool = False) -> Iterator[None]:
        """A context in which the global generators of torch (CPU), numpy and random are the shared stream. only_torch:
        only torch's is, which takes a tenth of the time."""
        if not self.divided:
            with self.undivided():
                yield
            return
        with self._lock:
            if self._drawing:
                yield
                return
            self._exchange(only_torch)
            self._drawing = True
            try:
                yield
            finally:
                self._drawing = False
                self._exchange(only_torch)

    @contextmanager
    def apart(self, *, only_torch: bool = False) -> Iterator[None]:
        """A context within `shared` in which the global generators are the rank's own again. only_torch: as for
        `shared`."""
        if not (self.divided and self._drawing):
            yield
            return
        self._exchange(only_torch)
        self._drawing = False
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._drawing = True
            self._exchange(only_torch)

    def _exchange(self, only_torch: bool) -> None:
        """What was in the global generators waits, and what waited is in them."""
        waited = self._shared
        if waited is None:  # the script has seeded inside, and all ranks draw the same until `split`
            return
        if only_torch:
            self._shared = waited._replace(torch=torch.default_generator.get_state())
            torch.default_generator.set_state(waited.torch)
        else:
            self._shared = State.capture()
            waited.having(self._shared, self._joined).restore()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which a batch of this rank's share is read. What is seeded for an item, as to change an image
        and its mask alike, is the rank's own."""
        before, self._reader = self._reader, threading.get_ident()
        try:
            yield
        finally:
            self._reader = before

    @property
    def reads(self) -> bool:
        return self._reader == threading.get_ident()

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
        for module, name, get, original, set_state in (
            (np.random, "numpy", np.random.get_state, _seed_numpy, "set_state"),
            (random, "random", random.getstate, _seed_python, "setstate"),
        ):
            setattr(module, "seed", self._patched_seed(name, get, module.seed, original))  # noqa: B010
            setattr(module, set_state, self._patched_set_back(name, get, getattr(module, set_state)))

    def _patched_seed(
        self, name: str, get: Callable[[], Any], named: Callable[..., Any], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Python's or NumPy's: it joins this generator's streams until training goes on."""

        @functools.wraps(named)
        def seed(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._pid or self._drawing or self.reads:
                return original(*args, **kwargs)
            before = get() if self.divided and name not in self._joined else None
            result = original(*args, **kwargs)
            self.seeded_anew.add(name)
            if before is not None:
                self._joined[name] = before
            return result

        return seed

    def _patched_set_back(self, name: str, get: Callable[[], Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """A state from before such a seed parts them again, as at the end of a context in which it held."""

        @functools.wraps(original)
        def set_state(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if name in self._joined and not self._drawing and repr(get()) == repr(self._joined[name]):
                del self._joined[name]
            return result

        return set_state

    def _patched_manual_seed(self) -> Callable[..., Any]:
        original = self._manual_seed

        def manual_seed(seed: int) -> Any:
            if self.reads:
                return original(seed)
            self.seeded = True
            if not self._drawing:
                self.seeded_anew.add("torch")
            if not self.divided:
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


def install(runtime: Runtime) -> Streams:
    """Seed this process before the script runs, and give the streams that `split` divides later.

    A world of one is left exactly as plain python leaves it.
    """
    streams = Streams(runtime.ranks.world.rank, enabled=runtime.ranks.config.seeding and not runtime.ranks.alone)
    if streams.enabled:
        seed_all(max(runtime.ranks.config.seed, 0))
        streams.install()
    return streams
