"""Values that all ranks come to have in common, by gatherings: where ranks are lost meanwhile, others give them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dadt.comm import plain
from dadt.train.ranks import Ranks


def take_first_ranks(ranks: Ranks, tensors: Sequence[torch.Tensor], name: str, then: Callable[[], None]) -> None:
    """The tensors become those of the first rank. then: called once they have."""
    came = False

    def take(lanes: Sequence[bytes]) -> None:
        nonlocal came
        values = plain.decode(lanes[0])
        if values is not None:
            came = True
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            then()

    while not came:  # where the first rank was lost, another is first
        mine = [t.cpu() for t in tensors] if ranks.group.rank == 0 else None
        ranks.wait(ranks.allgather(name, plain.encode(mine, name), take))


@torch.no_grad()
def take_means(ranks: Ranks, tensors: Sequence[torch.Tensor], name: str) -> None:
    """The tensors, small ones, become their means over ranks."""
    every = ranks.collect(name, [t.cpu() for t in tensors])
    for tensor, *values in zip(tensors, *every, strict=True):
        tensor.copy_(torch.stack(values).mean(0))
