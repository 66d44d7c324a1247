"""A sampler that gives each rank its share of a data set."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset
from torch.utils.data import distributed as torch_distributed

from dadt.api.lifecycle import rank as own_rank
from dadt.api.lifecycle import size


class DistributedSampler(torch_distributed.DistributedSampler[Any]):
    """torch's DistributedSampler for the ranks of this job, without a process group of torch's.

    dataset: must have a length. num_replicas, rank: by default `dadt.size()` and `dadt.rank()`. The other arguments and
    set_epoch are torch's.
    """

    def __init__(
        self, dataset: Dataset[Any], num_replicas: int | None = None, rank: int | None = None, **options: Any
    ) -> None:
        super().__init__(
            dataset,
            num_replicas=size() if num_replicas is None else num_replicas,
            rank=own_rank() if rank is None else rank,
            **options,
        )
