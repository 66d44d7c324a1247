"""One rank of a training whose compression changes, as `auto` tries one after the other."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from dadt.comm.executors.device import Averaging
from dadt.train.exchange.bucket_plan import BucketPlan
from dadt.train.exchange.exchange import Exchange
from dadt.train.exchange.step_metadata import StepMetadata
from dadt.world import World
from harness.executor_rank import connect
from harness.patience import PATIENCE

SHAPES = ((40, 16, 3, 3), (300,), (70, 30))
STEPS = ("none", "bf16", "bf16", "int8", "int8", "int4", "int4", "int4", "none", "none")
LAST = STEPS.index("none", 1)
"""The step that sends what is still owed."""
SCALED = 6
"""The step from which gradients are multiplied by a loss scale."""


class Peers:
    """This rank's connection, as an exchange uses it."""

    background = device = None

    def __init__(self, rank: int, size: int, folder: str, executor: str) -> None:
        world = World(rank=rank, world_size=size, local_rank=rank, local_size=size, cross_rank=0)
        self.connection = connect(executor, world, folder)
        self.engine, self.members = self.connection.engine, range(size)

    def wait(self, work: Averaging) -> None:
        work.wait(PATIENCE)

    def keep_failed(self, needed: object) -> None:
        raise AssertionError("no exchange fails here")


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    first, *others = (torch.randn(shape, generator=random) for shape in SHAPES)
    return [first.to(memory_format=torch.channels_last), *others]


def main(executor: str, rank: int, size: int, folder: str) -> None:
    """Print by how much the sum of all that came differs from that of all that was sent: before what is owed is sent,
    right after it, and at the end; and a digest of what came."""
    torch.set_num_threads(1)
    peers = Peers(rank, size, folder, executor)
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients(0, 0)]
    plan, digest = BucketPlan(parameters, [], 8000, turns=1), hashlib.sha256()
    weights = [1.0 + each for each in range(size)]
    missing, now, off = [torch.zeros_like(p) for p in parameters], "none", []
    for step, name in enumerate(STEPS):
        if name != now:
            plan.compress(now := name)
        for p, g in zip(parameters, gradients(step, rank), strict=True):
            p.grad = g * 2 if step >= SCALED else g
        exchange = Exchange(peers, plan, step, f"step {step}", weights[rank])
        exchange.scale = torch.tensor(2.0) if step >= SCALED else None
        exchange.close(StepMetadata(plan.crc, 0, 0, 0, 0, False, 1.0, 0.0))
        exchange.receive()
        came = dict(exchange.averaged_gradients())
        sent = [
            sum(g * w for g, w in zip(every, weights, strict=True)) / sum(weights)
            for every in zip(*(gradients(step, each) for each in range(size)), strict=True)
        ]
        for p, lacks, mean in zip(parameters, missing, sent, strict=True):
            lacks += mean - came[p] / (2 if step >= SCALED else 1)
            digest.update(came[p].contiguous().numpy().tobytes())
        off.append(max(float(lacks.abs().max()) for lacks in missing))
    peers.engine.close(PATIENCE)
    peers.connection.close()
    print(f"{off[LAST - 1]} {off[LAST]} {off[-1]} {digest.hexdigest()}")
