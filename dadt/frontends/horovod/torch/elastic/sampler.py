"""A sampler that knows how many samples of a pass over the data have been used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from dadt.frontends.horovod.torch import place


class ElasticSampler(Sampler[int]):
    """Divides the unused samples of a pass over the data among the ranks. `TorchState(sampler=...)` saves and restores
    the sampler, and a checkpoint of its state is valid for all ranks.

    dataset: must have a length. shuffle: whether each pass has an order of its own. seed: for this order, the same on
    all ranks.
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        """Number of samples that all ranks together have used in this pass."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin a pass, of which no sample has been used yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has used a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the pass, and how many samples of it all ranks have used."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a pass at the point that the state describes."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the unused samples of the pass among the current ranks again."""
        self.num_replicas, self.rank = place.size(), place.rank()
        order = list(range(len(self.dataset)))  # type: ignore[arg-type]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's share of the unused samples, every n-th of n ranks. Some samples occur twice if
        their number cannot be divided by n."""
        left = self.remaining_indices
        self.indices = (left + left[: self.total_size - len(left)])[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
