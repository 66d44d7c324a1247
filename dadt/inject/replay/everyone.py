"""Gathers bytes from all ranks of the job between two steps, also from those that hold other parts of the model."""

from __future__ import annotations

from dadt.errors import PeerLost
from dadt.train.loss.gathering import Gathering
from dadt.train.ranks import Ranks


def gather_from_all(ranks: Ranks, name: str, data: bytes) -> Gathering:
    """Gather as `Ranks.gather_from_all` does. If ranks are lost meanwhile, connect anew, and gather from those that are
    left, as all of these do. Call this between two steps."""
    while True:
        try:
            return ranks.gather_from_all(name, data)
        except PeerLost as error:
            ranks.regroup(error)
