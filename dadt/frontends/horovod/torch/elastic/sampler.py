"""A sampler that knows which samples of a pass have been used."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from dadt.api import lifecycle


class ElasticSampler(Sampler[int]):
    """Divides what is left of a pass among the ranks. `TorchState(sampler=...)` saves and restores it.

    dataset: must have a length. shuffle: whether each pass has an order of its own. seed: of that order, alike on all
    ranks.
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin a pass: none of its samples has been used."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Tell that this rank has used the batch of this number."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Tell that these samples have been used."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch of this number."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Return the pass, and the samples used in it."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on within a pass."""
        self.epoch, self.processed_indices = state_dict["epoch"], set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Divide what is left anew."""
        initialized = lifecycle.initialized()
        self.num_replicas = lifecycle.size() if initialized else 1
        self.rank = lifecycle.rank() if initialized else 0
        left = [i for i in range(len(self.dataset)) if i not in self.processed_indices]  # type: ignore[arg-type]
        self.remaining_indices = left
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices = self._mine()

    def _mine(self) -> list[int]:
        """Every n-th; some occur twice where they cannot be divided."""
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        while order and len(order) < self.total_size:
            order += order[: self.total_size - len(order)]
        return order[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        self.indices = self._mine()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
