"""Makes tensors equal on all ranks by an allgather. If ranks are lost meanwhile, a remaining rank that has the values
sends them to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dadt.comm import plain
from dadt.train.ranks import Ranks


def take_first_ranks(ranks: Ranks, tensors: Sequence[torch.Tensor], name: str, then: Callable[[], None]) -> None:
    """Replace the tensors on all ranks by those of the first rank. then: callback for the time when the tensors are
    replaced."""
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

    while not came:  # repeat if the first rank was lost, since another one replaces it
        mine = [t.cpu() for t in tensors] if ranks.group.rank == 0 else None
        ranks.wait(ranks.allgather(name, plain.encode(mine, name), take))


@torch.no_grad()
def take_means(ranks: Ranks, tensors: Sequence[torch.Tensor], name: str) -> None:
    """Replace the tensors, which should be small, by their means over all ranks."""
    every = ranks.collect(name, [t.cpu() for t in tensors])
    for tensor, *values in zip(tensors, *every, strict=True):
        tensor.copy_(torch.stack(values).mean(0))
