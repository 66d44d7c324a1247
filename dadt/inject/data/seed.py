"""Random number streams: all ranks start alike, then each rank has a stream of its own beside one that all ranks share.

Before the script runs, every rank seeds torch, numpy and random alike, so models, splits and initial values agree. When
training begins, the state of the global generators becomes the *shared stream*, from which samplers and DataLoader base
seeds continue to draw in the same order as in a single process. The global generators are then reseeded per rank, so
that dropout and augmentation differ between ranks, reproducibly.
"""

from __future__ import annotations

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

from dadt.inject.patch import replaces
from dadt.train.runtime import Runtime

_seed_numpy, _set_numpy, _set_random = np.random.seed, np.random.set_state, random.setstate
"""The original functions of NumPy and Python, stored before DADT replaces them to notice when the script calls them."""
python_generator = random.seed.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""
REMEMBERED_STATES = 64
"""Maximum number of random states that the script has read and that are remembered together with the state, at that
time, of the random stream that all ranks share."""


class State(NamedTuple):
    """States of the global generators of a process that samplers draw from: those of torch (CPU), numpy and random."""

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
        """Return this state, with the generators named in `names` replaced by those of `other`."""
        return self._replace(**{name: getattr(other, name) for name in names})

    def plain(self) -> dict[str, Any]:
        """Return the state as plain values and tensors, for a checkpoint."""
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
        """Return a seed in [0, 2**56) that depends on the states of all three generators."""
        text = self.torch.numpy().tobytes() + repr(self.random).encode()
        text += b"".join(np.asarray(field).tobytes() for field in self.numpy[1:])
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def mix(seed: int | str, rank: int) -> int:
    """Return a seed for `rank` in [0, 2**56), different from other ranks' seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{rank}".encode(), digest_size=7).digest(), "big")


def seed_all(seed: int, manual_seed: Callable[[int], Any] = torch.manual_seed) -> None:
    """Seed torch (on every device), numpy and random."""
    python_generator.seed(seed)
    _seed_numpy(seed % 2**32)
    manual_seed(seed)


def _seed_python(*args: Any, **kwargs: Any) -> None:
    """Call the seed method of Python's generator, looked up at the time of the call because it may be patched later."""
    python_generator.seed(*args, **kwargs)


class Ahead(Protocol):
    """The interface of `Parting`, which makes ranks' random numbers differ in scripts that call `dadt.init`."""

    @property
    def ahead(self) -> bool: ...

    def part(self) -> None: ...
    def waive(self) -> None: ...


class Resumed(NamedTuple):
    """Random streams loaded from a checkpoint, from which random numbers are drawn after the next `split`."""

    shared: State
    own: State | None
    """This rank's own stream; None if the checkpoint was not written by this rank."""


class Streams:
    """The random stream shared by all ranks, and this rank's own. Before `split`, both are the global generators.

    In a child process (a DataLoader's worker), and with `enabled` False, all methods do nothing.
    """

    def __init__(self, rank: int, *, enabled: bool = True) -> None:
        self.rank = rank
        self.enabled = enabled
        self._shared: State | None = None
        self._left: State | None = None
        """State of this rank's own random stream when the script's call of torch.manual_seed last replaced it by the
        random stream that all ranks share."""
        self._drawing = False
        self.seeded = False
        """Whether the script has called torch.manual_seed."""
        self._resumed: Resumed | None = None
        self.seeded_anew: set[str] = set()
        """Names (fields of State) of the generators that the script has seeded since it loaded a checkpoint."""
        self.restored = 0
        """How often the state of the random stream that all ranks share was replaced by a stored one, as on resuming
        from a checkpoint."""
        self._has_parted = False
        self._joined: dict[str, Any] = {}
        """Names (fields of State) of the generators that the script has seeded by `random.seed` or `numpy.random.seed`
        after `split`, each with this rank's state before the seed. Until the next `split`, these generators' states
        also belong to the random stream that all ranks share."""
        self._reader = 0
        """Identifier of the thread that is reading a batch of this rank's share; 0 if none is."""
        self.parting: Ahead | None = None
        self.undivided: Callable[[], AbstractContextManager[None]] = nullcontext
        """Function that returns the context in which `shared` runs as long as ranks have no streams of their own."""
        self._remembered: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._manual_seed: Callable[[int], Any] = torch.manual_seed

    @property
    def divided(self) -> bool:
        """Whether ranks have random streams of their own (always False in a child process)."""
        return self._shared is not None and os.getpid() == self._pid

    def numpy_state(self) -> bytes:
        """Return the state of NumPy's generator in the random stream that all ranks share, as bytes."""
        state: Any = self._common.numpy if self.divided else np.random.get_state()
        return b"".join(np.asarray(field).tobytes() for field in state[1:])

    def split(self) -> None:
        """Give this rank a random stream of its own. Returns quickly if the rank already has one."""
        if not self.enabled or (self._shared is not None and not self._joined) or os.getpid() != self._pid:
            return
        if self._drawing:  # within `shared`, as in a step whose closure evaluates the model
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
        """Return the random stream that all ranks share, this rank's own stream (None unless loaded from a checkpoint),
        and the names of the generators that the script has seeded since it loaded the checkpoint."""
        current, resumed, self._resumed = State.capture(), self._resumed, None
        if resumed is None:
            return current, None, set()
        self.restored += "torch" not in self.seeded_anew
        # Seeds that the script has set after loading belong to the stream that all ranks share.
        return resumed.shared.having(current, self.seeded_anew), resumed.own, self.seeded_anew

    @property
    def _common(self) -> State:
        """The random stream that all ranks share, with the generators that the script has seeded since the streams were
        split."""
        if self._drawing:
            return State.capture()
        assert self._shared is not None
        return self._shared.having(State.capture(), self._joined) if self._joined else self._shared

    def state(self) -> dict[str, Any]:
        """Return the states of both random streams for a checkpoint; empty before `split`."""
        if not self.divided:
            return {}
        return {"shared": self._common.plain(), "own": State.capture().plain()}

    def loaded(self) -> None:
        """Forget which generators the script has seeded, because it has now loaded a checkpoint."""
        self.seeded_anew = set()

    def load_state(self, shared: dict[str, Any], own: dict[str, Any] | None, seeded_anew: Iterable[str]) -> None:
        """Set the random streams that `split` will restore. Does nothing after the first `split`, because a script that
        reloads its best weights during training continues with its data. own: this rank's stream; None for a new
        one."""
        if self.enabled and not self._has_parted:
            self._resumed = Resumed(State.from_plain(shared), None if own is None else State.from_plain(own))
            self.seeded_anew = set(seeded_anew)

    def place(self, shared: State) -> None:
        """Set the random stream that all ranks share to a stored state, such as one in a snapshot."""
        self._shared = shared
        self._joined.clear()
        self.restored += 1

    def part_anew(self, shared: State) -> None:
        """Set the random stream that all ranks share to the state `shared`, and derive a new stream for this rank from
        it."""
        self.place(shared)
        seed_all(mix(shared.seed(), self.rank), self._manual_seed)

    def _rejoin(self) -> None:
        """Called when the script seeds torch during training, because the data, splits and weights drawn next must
        agree on all ranks. Until `split` (at the next training batch or forward) the global generators are again the
        random stream that all ranks share."""
        common, self._left = self._common, State.capture()
        common.restore()
        self._shared = None
        self._joined.clear()

    @contextmanager
    def shared(self, *, only_torch: bool = False) -> Iterator[None]:
        """A context in which the global generators of torch (CPU), numpy and random are the random stream that all
        ranks share. only_torch: switch only torch's generator, which takes a tenth of the time."""
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
        """A context, for use within `shared`, in which the global generators are the rank's own stream again.
        only_torch: switch only torch's generator."""
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
        """Swap the states of the global generators with those in `self._shared`."""
        waited = self._shared
        if waited is None:  # the script has set a seed meanwhile, so there is only one stream
            return
        if only_torch:
            self._shared = waited._replace(torch=torch.default_generator.get_state())
            torch.default_generator.set_state(waited.torch)
        else:
            self._shared = State.capture()
            waited.having(self._shared, self._joined).restore()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which a batch of this rank's share is read. Seeds that the data set sets for an item, such as to
        transform an image and its mask alike, then affect only this rank's stream."""
        before, self._reader = self._reader, threading.get_ident()
        try:
            yield
        finally:
            self._reader = before

    @property
    def reads(self) -> bool:
        return self._reader == threading.get_ident()

    def install(self) -> None:
        """Patch the functions of torch, numpy and random that seed generators, so that the script's seeds affect both
        the random stream that all ranks share and the rank's own."""
        self._manual_seed = torch.manual_seed
        self._patch_torch()
        self._patch_seed("numpy", np.random, "set_state", np.random.get_state, _seed_numpy)
        self._patch_seed("random", random, "setstate", random.getstate, _seed_python)

    def _patch_seed(
        self, name: str, module: Any, set_back: str, get: Callable[[], Any], original: Callable[..., Any]
    ) -> None:
        """Patch the functions of `random` or NumPy that set the generator's seed and state. After the script sets a
        seed, all ranks draw the same numbers until training continues, or until the script sets the state from before
        the seed again."""

        @replaces("seed", module)
        def seed(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._pid or self._drawing or self.reads:
                return original(*args, **kwargs)
            before = get() if self.divided and name not in self._joined else None
            result = original(*args, **kwargs)
            self.seeded_anew.add(name)
            if before is not None:
                self._joined[name] = before
            return result

        @replaces(set_back, module)
        def set_state(*args: Any, **kwargs: Any) -> Any:
            result = set_state.__wrapped__(*args, **kwargs)
            if name in self._joined and not self._drawing and repr(get()) == repr(self._joined[name]):
                del self._joined[name]
            return result

    def _patch_torch(self) -> None:
        """Patch the functions of torch that set the generator's seed, and that read and set its state. When the script
        restores a state that it has read before, as fork_rng does, both streams are restored: otherwise `with
        fork_rng(): manual_seed(0)` in every epoch would repeat the same shuffle."""

        @replaces("manual_seed", torch, torch.random)
        def manual_seed(seed: int) -> Any:
            if self.reads:
                return self._manual_seed(seed)
            self.seeded = True
            if not self._drawing:
                self.seeded_anew.add("torch")
            if not self.divided:
                return self._manual_seed(seed)
            with self._lock:
                if not self._drawing:  # within `shared`, a seed (of a sampler, say) is for the common stream only
                    self._rejoin()
                return self._manual_seed(seed)

        @replaces("initial_seed", torch, torch.random)
        def initial_seed() -> int:
            """A script asks for it to make generators of its own, as for the order of data, which all ranks share."""
            if not self.divided or self._drawing or self.reads:
                return int(initial_seed.__wrapped__())
            shared = torch.Generator()
            shared.set_state(self._common.torch)
            return shared.initial_seed()

        @replaces("get_rng_state", torch, torch.random)
        def get_rng_state() -> torch.Tensor:
            state: torch.Tensor = get_rng_state.__wrapped__()
            if self.divided and not self._drawing:
                assert self._shared is not None
                self._remembered[state.numpy().tobytes()] = self._shared.torch
                while len(self._remembered) > REMEMBERED_STATES:
                    self._remembered.popitem(last=False)
            return state

        @replaces("set_rng_state", torch, torch.random)
        def set_rng_state(new_state: torch.Tensor) -> None:
            set_rng_state.__wrapped__(new_state)
            kept = self._remembered.get(new_state.numpy().tobytes())
            if kept is None or self._drawing or os.getpid() != self._pid:
                return
            if self._shared is not None:
                self._shared = self._shared._replace(torch=kept)
            elif self._left is not None:  # the script has set a seed since, so there is one stream
                self._shared = State.capture()._replace(torch=kept)
                np.random.set_state(self._left.numpy)
                random.setstate(self._left.random)


def install(runtime: Runtime) -> Streams:
    """Seed this process before the script runs, and return its random streams, which `split` divides later.

    In a job of one rank, no generator is seeded.
    """
    streams = Streams(runtime.ranks.world.rank, enabled=runtime.ranks.config.seeding and not runtime.ranks.alone)
    if streams.enabled:
        seed_all(max(runtime.ranks.config.seed, 0))
        streams.install()
    return streams
