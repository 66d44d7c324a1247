"""Divides the data of fastai's DataLoaders, which are not torch's: a loader that shuffles and trains gives each rank
its share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from dadt.errors import ConfigError
from dadt.inject.data.role import EVALUATES, TRAINS, LoaderRole
from dadt.inject.data.seed import Streams
from dadt.inject.data.share import PerRank, StepShare
from dadt.inject.patch import replaces
from dadt.train.batch_weight import Pass
from dadt.train.runtime import Runtime


class ScriptLoaders(Protocol):
    """The attributes of the script's loaders that FastaiLoaders uses."""

    runtime: Runtime
    streams: Streams
    pid: int
    gives_shares: bool

    def role(self, loader: Any) -> LoaderRole: ...
    def asked(self, role: LoaderRole) -> str: ...


class FastaiLoaders:
    """Passes over fastai's loaders. All ranks draw the same order, because fastai seeds the order from Python's random
    numbers when a loader is built. Each rank then takes its own batches of this order."""

    def __init__(self, loaders: ScriptLoaders) -> None:
        self._loaders = loaders
        self._runtime = loaders.runtime

    def patch(self, module: Any) -> None:
        """Patch fastai's DataLoader. module: the imported fastai.data.load."""
        kind = module.DataLoader

        @replaces("__iter__", kind)
        def iterate(loader: Any) -> Any:
            here = os.getpid() == self._loaders.pid and not self._runtime.script.explicit
            original = iterate.__wrapped__
            return self._pass(loader, original) if here and self._shares(loader) else original(loader)

        @replaces("__len__", kind)
        def length(loader: Any) -> int:
            steps: int = length.__wrapped__(loader)
            role = self._loaders.role(loader)
            guess = TRAINS if loader.shuffle else EVALUATES
            if (role.kind or self._loaders.asked(role) or guess) != TRAINS or not self._can(loader) or role.gives_all:
                return steps
            size = self._runtime.ranks.world.world_size
            return steps // size if loader.drop_last else -(-steps // size)

    def _can(self, loader: Any) -> bool:
        """Return whether DADT can divide the loader's data among ranks. It cannot if the script divides the data
        itself, or if samples are not read in batches by index."""
        own = self._runtime.script.is_distributed or type(loader).__name__ == "DistributedDL"
        return not own and loader.indexed and loader.n is not None and bool(loader.bs)

    def _shares(self, loader: Any) -> bool:
        """Return whether each rank gets only its share in a new pass over the loader, and record what the loader is
        used for."""
        role = self._loaders.role(loader)
        optimizers = self._runtime.optimizers
        trains = torch.is_grad_enabled() and (optimizers.trains() or not optimizers.registered)
        kind = role.kind or self._loaders.asked(role) or (TRAINS if loader.shuffle and trains else EVALUATES)
        shares = kind == TRAINS and torch.is_grad_enabled() and self._can(loader)
        role.gives_all = not shares
        if shares and not role.kind:
            if (batch := self._runtime.ranks.config.batch) != "per-rank":
                raise ConfigError(
                    f"--batch {batch}: {role.name} is one of fastai, whose batches are not divided; use"
                    " --batch per-rank"
                )
            role.kind = TRAINS
            each = f"{loader.n // self._runtime.ranks.world.world_size:,} per worker"
            self._runtime.ranks.say(f"{role.name} (fastai, {loader.n:,} samples, shuffled): trains, {each}.")
        return shares

    def _pass(self, loader: Any, iterate: Any) -> Iterator[Any]:
        self._runtime.claim()
        self._loaders.streams.split()
        self._loaders.gives_shares = True
        world, source = self._runtime.ranks.world, Pass(self._loaders.role(loader).name)
        pieces: list[StepShare] = []

        def indices() -> list[Any]:
            del loader.get_idxs
            mine = PerRank(loader.get_idxs(), loader.bs, loader.drop_last, world.rank, world.world_size)
            pieces.extend(mine)
            return [index for piece in pieces for index in piece.index]

        # Set on the instance, because a subclass may override get_idxs. `indices` deletes it again when called.
        loader.get_idxs = indices
        for number, batch in enumerate(iterate(loader)):
            self._runtime.batches.drew(source, pieces[number].samples, loader.bs)
            yield batch
        self._runtime.batches.pass_over(source)
