"""In a script that calls `dadt.init`, random numbers are the script's: all ranks have begun alike, so that weights and
splits agree, and from the first step on each draws its own, but for what the script has seeded since `dadt.init`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dadt.inject.data.seed import State, mix

SEEDING: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (random, ("seed", "setstate")),
    (np.random, ("seed", "set_state")),
)
"""Functions that seed Python's and NumPy's generators. Those of torch remember their seed."""


class Parting:
    """Keeps the ranks' generators alike from `dadt.init` until each rank draws numbers of its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._initial = torch.initial_seed()
        self._seeded: set[ModuleType] = set()
        """The modules whose generators the script has seeded since."""
        self._done = False
        for module, names in SEEDING:
            for name in names:
                setattr(module, name, self._noted(module, getattr(module, name)))
        manual_seed = torch.manual_seed

        @functools.wraps(manual_seed)
        def noted(seed: int) -> Any:
            if seed == self._initial:  # any other shows in the generator, also that it was taken back (fork_rng)
                self._seeded.add(torch)
            return manual_seed(seed)

        torch.manual_seed = torch.random.manual_seed = noted
        self._manual_seed = manual_seed
        register_optimizer_step_post_hook(lambda *_: self.part())

    @property
    def ahead(self) -> bool:
        """Whether torch still draws the same on all ranks, without the script's having seeded it."""
        return not self._done and not self._torch_is_seeded()

    def waive(self) -> None:
        """The script has seeded: all is its own."""
        self._done = True

    def part(self) -> None:
        """The first call counts: training begins, or an optimizer that is not wrapped has made its first step."""
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
            of_gpus = in_use and torch.cuda.initial_seed() != self._initial  # which are the script's
            (torch.default_generator.manual_seed if of_gpus else self._manual_seed)(seed)

    def _torch_is_seeded(self) -> bool:
        return torch in self._seeded or torch.initial_seed() != self._initial

    def _noted(self, module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seeding(*args: Any, **kwargs: Any) -> Any:
            self._seeded.add(module)
            return original(*args, **kwargs)

        return seeding
