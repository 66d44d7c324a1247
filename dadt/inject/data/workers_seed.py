"""Makes the seeds of a DataLoader's worker processes differ between ranks that read a share."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data import dataloader as torch_dataloader

from dadt.inject.data.samplers import inner_sampler
from dadt.inject.data.seed import Streams, mix
from dadt.inject.patch import replaces


def install(streams: Streams, pid: int) -> None:
    """Patch the creation of DataLoader iterators, so that each rank seeds its worker processes differently. pid: id of
    the process that trains."""

    @replaces("__init__", torch_dataloader._BaseDataLoaderIter)
    def init(self: Any, loader: Any) -> None:
        if not isinstance(loader, DataLoader):  # fastai passes a stand-in for a DataLoader
            init.__wrapped__(self, loader)
            return
        sampler, parting = inner_sampler(loader), streams.parting
        drawn = type(sampler) is RandomSampler and loader.generator is None and sampler.generator is None
        if drawn and parting is not None and parting.ahead and os.getpid() == pid:
            parting.part()  # without reseeding, all ranks would read the same data until the first step
        init.__wrapped__(self, loader)
        rank = loader.__dict__.get("_dadt_rank")
        if rank is None and loader.generator is None and streams.parting is not None and streams.parting.ahead:
            rank = streams.rank
        # augmentation in the loader's worker processes should differ between ranks
        if rank is not None and streams.enabled:
            self._base_seed = mix(self._base_seed, rank)
