"""What the two ends of an exchange of gossip compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from dadt.algorithms.gossip.pairing import tie
from dadt.algorithms.gossip.snapshot import WeightSnapshot
from dadt_cli.bench.cost import LinkState

TIES = 3


def ties(weights: Sequence[torch.Tensor], compressions: Sequence[str]) -> dict[str, LinkState]:
    """By compression. Two ends, both here: no byte travels."""
    found = {}
    for compression in compressions:
        here, there = WeightSnapshot(weights), WeightSnapshot(weights)
        here.publish(weights, 1)
        mine, theirs = tie(compression, here, asks=True), tie(compression, there, asks=False)
        rows = []
        for _ in range(TIES):
            size = mine.size
            sent, came = here.take(size), there.take(size)
            begun = time.thread_time()
            step = mine.say(here, sent)
            said = time.thread_time()
            theirs.say(there, came)
            answer = came.clone()
            theirs.settle(there, came, sent.clone(), step)
            answered = time.thread_time()
            mine.settle(here, sent, answer, step)
            rows.append((size, said - begun, time.thread_time() - answered))
        # The first one sends all, whatever the compression; of PowerGossip, the others are of two kinds in turn.
        found[compression] = LinkState(*(statistics.mean(column) for column in zip(*rows[1:], strict=True)))
    return found
