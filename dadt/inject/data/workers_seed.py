"""The seeds of a DataLoader's worker processes, which differ between ranks where they read a share."""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data import dataloader as torch_dataloader

from dadt.inject.data.samplers import inner_sampler
from dadt.inject.data.seed import Streams, mix


def install(streams: Streams, pid: int) -> None:
    """pid: of the process that trains."""
    original = torch_dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(original)
    def iterator_init(self: Any, loader: Any) -> None:
        if not isinstance(loader, DataLoader):  # fastai's stand-in for one
            original(self, loader)
            return
        sampler, parting = inner_sampler(loader), streams.parting
        drawn = type(sampler) is RandomSampler and loader.generator is None and sampler.generator is None
        if drawn and parting is not None and parting.ahead and os.getpid() == pid:
            parting.part()  # or all ranks would go through the same order until the first step
        original(self, loader)
        rank = loader.__dict__.get("_dadt_rank")
        if rank is None and loader.generator is None and streams.parting is not None and streams.parting.ahead:
            rank = streams.rank
        if rank is not None and streams.enabled:  # augmentation in the loader's workers differs by rank
            self._base_seed = mix(self._base_seed, rank)

    setattr(torch_dataloader._BaseDataLoaderIter, "__init__", iterator_init)  # noqa: B010 (mypy minds else)
