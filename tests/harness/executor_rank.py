"""One rank of test_executors.py."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import torch
from torch.distributed import FileStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import Backend

from dadt import _core
from dadt.comm import executors
from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.executors import c10d
from dadt.comm.executors.base import Connection
from dadt.comm.executors.device import Device
from dadt.config import Config
from dadt.world import World
from harness.patience import PATIENCE

COUNT = 1_200_001
"""Two chunks of the hierarchical executor and a bit."""


def make_ours(store, rank, world_size, timeout):
    """As a package registers a backend of its own."""
    return ProcessGroupGloo(store, rank, world_size, timeout=timeout)


def connect(executor: str, world: World, folder: str) -> Connection:
    store = FileStore(str(Path(folder) / "store"), world.world_size)
    meet = GroupRendezvous(store, world.rank, world.world_size, PATIENCE)

    Backend.register_backend("ours", make_ours, devices="cpu")
    rest, _, broadcasts = executor.partition("+")
    config = Config(executor=rest, broadcast_executor=broadcasts, timeout=PATIENCE, start_timeout=PATIENCE)
    return executors.connect(config, world, meet)


def sums(connection: Connection, rank: int, size: int) -> None:
    digest = hashlib.sha256()
    flats = [torch.randn(COUNT, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    for lane in (b"", b"lane of %d" % rank):
        layout = _core.Layout(_core.DType.float32, [COUNT - 7, 7])
        mine = flats[rank].clone()
        addresses = [mine.data_ptr(), mine[COUNT - 7 :].data_ptr()]
        work = connection.engine.allreduce(layout, addresses, addresses, "all", 1.0, lane)
        work.wait(PATIENCE)
        assert torch.allclose(mine, torch.stack(flats).mean(0), atol=1e-5), "the mean"
        assert work.lanes == ([b"lane of %d" % each for each in range(size)] if lane else [b""] * size)
        digest.update(mine.numpy().tobytes())
    for root in range(size):
        told = flats[root].clone() if rank == root else torch.zeros(COUNT)
        layout = _core.Layout(_core.DType.float32, [COUNT])
        connection.engine_of("broadcast").broadcast(layout, [told.data_ptr()], root, f"from {root}").wait(PATIENCE)
        assert torch.equal(told, flats[root]), f"the broadcast from {root}"
    print(f"right {digest.hexdigest()}")


def averages(connection: Connection, world: World, folder: str) -> None:
    """NCCL's way, with Gloo's group in place of NCCL's and the CPU in that of a GPU."""
    store = FileStore(str(Path(folder) / "group"), world.world_size)
    meet = GroupRendezvous(store, world.rank, world.world_size, PATIENCE)
    group = c10d.join("gloo", meet, world, range(world.world_size), Config(timeout=PATIENCE))
    device = Device(group, connection.engine, torch.device("cpu"), world.rank, world.world_size)
    rank, size = world.rank, world.world_size
    digest = hashlib.sha256()
    for step in range(3):
        flat = torch.full((COUNT,), torch.nan)
        places = [flat[: COUNT - 7].view(-1, 2), flat[COUNT - 7 :]]
        every = [torch.randn(COUNT, generator=torch.Generator().manual_seed(each)) for each in range(size)]
        values = [every[rank][: COUNT - 7].view(-1, 2), None if rank == 1 else every[rank][COUNT - 7 :]]
        weight = float(rank + step)
        work = device.average(values, places, flat, name=f"step {step}", weight=weight, lane=b"%d" % rank)
        work.wait(PATIENCE)
        work.wait(PATIENCE)
        every[1][COUNT - 7 :] = 0
        want = sum(t * (r + step) for r, t in enumerate(every)) / sum(r + step for r in range(size))
        assert torch.allclose(flat, want, atol=1e-5), "the mean"
        assert work.lanes == [b"%d" % each for each in range(size)]
        assert work.done and work.seconds >= 0 and work.weight_sum == sum(r + step for r in range(size))
        digest.update(flat.numpy().tobytes())
    device.close(failed=False)
    print(f"right {digest.hexdigest()}")


def dies(connection: Connection, rank: int, victim: int) -> None:
    """The victim in the middle of it all, so that the others are in the engine, in a shared or in a cross part."""
    layout = _core.Layout(_core.DType.float32, [COUNT])
    mine = torch.zeros(COUNT)
    for step in range(1000):
        if (rank, step) == (victim, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        connection.engine.allreduce(layout, [mine.data_ptr()], [mine.data_ptr()], f"step {step}").wait(2 * PATIENCE)


def main(executor: str, hosts: str, rank: int, folder: str, what: str) -> None:
    torch.set_num_threads(1)
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    world = World(
        rank=rank,
        world_size=len(hosts),
        local_rank=here.index(rank),
        local_size=len(here),
        cross_rank=int(hosts[rank]),
    )
    connection = connect("shm" if executor == "nccl's way" else executor, world, folder)
    if what.startswith("dies"):
        dies(connection, rank, int(what.split()[1]))
    elif executor == "nccl's way":
        averages(connection, world, folder)
    else:
        sums(connection, rank, len(hosts))
    connection.engine.close(PATIENCE)
    connection.close()
