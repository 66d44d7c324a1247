"""Measures the computation at both ends of one `gossip` exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from dadt.algorithms.gossip.pairing import link_state
from dadt.algorithms.gossip.snapshot import WeightSnapshot
from dadt_cli.bench.cost import LinkCost

EXCHANGES = 3


def link_costs(weights: Sequence[torch.Tensor], compressions: Sequence[str]) -> dict[str, LinkCost]:
    """Measure the cost of one end of a `gossip` exchange, by compression. Both ends are in this process, so no byte
    travels."""
    found = {}
    for compression in compressions:
        here, there = WeightSnapshot(weights), WeightSnapshot(weights)
        here.publish(weights, 1)
        mine, theirs = link_state(compression, here, asks=True), link_state(compression, there, asks=False)
        rows = []
        for _ in range(EXCHANGES):
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
        # The first exchange is left out, since under any compression it sends all weights. The mean covers two
        # exchanges, because PowerGossip alternates between two kinds of exchange.
        found[compression] = LinkCost(*(statistics.mean(column) for column in zip(*rows[1:], strict=True)))
    return found
