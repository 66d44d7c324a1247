"""Makes random numbers differ between ranks in a script that calls `dadt.init`. All ranks begin with the same
generators, so that weights and data splits agree. When training begins, each rank's generators are reseeded
differently, except those that the script has seeded since `dadt.init`.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dadt.inject.data.seed import State, mix
from dadt.inject.patch import replaces

SEEDING: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (random, ("seed", "setstate")),
    (np.random, ("seed", "set_state")),
)
"""Functions that seed the generators of Python and NumPy. torch's are not listed, because its generators store their
seed."""


class Parting:
    """Keeps the random number generators of all ranks alike after `dadt.init`, until `part` reseeds them differently on
    each rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._initial = torch.initial_seed()
        self._seeded: set[ModuleType] = set()
        """Modules whose generators the script has seeded since `dadt.init`."""
        self._done = False
        for module, names in SEEDING:
            for name in names:
                self._note(module, name)

        @replaces("manual_seed", torch, torch.random)
        def manual_seed(seed: int) -> Any:
            # Only a call with the initial seed needs a record, because any other seed is visible in the generator
            # itself, even after fork_rng has undone it.
            if seed == self._initial:
                self._seeded.add(torch)
            return manual_seed.__wrapped__(seed)

        self._manual_seed = manual_seed.__wrapped__
        register_optimizer_step_post_hook(lambda *_: self.part())

    @property
    def ahead(self) -> bool:
        """Whether torch's generators still draw the same numbers on all ranks, although the script has not seeded
        them."""
        return not self._done and not self._torch_is_seeded()

    def waive(self) -> None:
        """Never reseed the generators, because the script seeds them itself."""
        self._done = True

    def part(self) -> None:
        """Reseed, differently on each rank, the generators that the script has not seeded. Only the first call has an
        effect: when training begins, or after the first step of an optimizer that DADT does not wrap."""
        if self._done:
            return
        self._done = True
        seed = mix(State.capture().seed(), self._rank)
        if random not in self._seeded:
            random.seed(seed)
        if np.random not in self._seeded:
            np.random.seed(seed % 2**32)
        if not self._torch_is_seeded():
            in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            # True if the script has seeded the GPU generators, so that only the CPU generator is reseeded.
            of_gpus = in_use and torch.cuda.initial_seed() != self._initial
            (torch.default_generator.manual_seed if of_gpus else self._manual_seed)(seed)

    def _torch_is_seeded(self) -> bool:
        return torch in self._seeded or torch.initial_seed() != self._initial

    def _note(self, module: ModuleType, name: str) -> None:
        @replaces(name, module)
        def seed(*args: Any, **kwargs: Any) -> Any:
            self._seeded.add(module)
            return seed.__wrapped__(*args, **kwargs)
