"""Gloo over TCP, through a torch.distributed process group of our own: the script may want the default one."""

from __future__ import annotations

import datetime
import struct
import threading
import zlib
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from dadt import _core
from dadt.config import Config
from dadt.errors import Mismatch
from dadt.world import World

_HEADER = struct.Struct("<Id")  # crc32 of the operation's name, weight
_TORCH = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def connect(
    config: Config, world: World, meet: Callable[[str, bytes], list[bytes]]
) -> tuple[_core.Engine, Callable[[], None]]:
    timeout = datetime.timedelta(seconds=config.timeout)
    address = world.address or "127.0.0.1"
    port = 0
    if world.rank == 0:
        server = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = server.port
    host, _, number = meet("gloo endpoint", f"{address}:{port}".encode())[0].decode().rpartition(":")
    store = server if world.rank == 0 else TCPStore(host, int(number), is_master=False, timeout=timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    group = ProcessGroupGloo(PrefixStore("dadt", store), world.rank, world.world_size, options)
    engine = _core.Engine(None, world.rank, world.world_size, config.timeout)
    # A daemon: a peer that never comes must not keep the process from ending.
    thread = threading.Thread(target=Gloo(engine, group, world).run, name="dadt-gloo", daemon=True)
    thread.start()
    return engine, lambda: thread.join(5.0)


class Gloo:
    """Pulls operations from the engine, one at a time, on a thread of its own."""

    def __init__(self, engine: _core.Engine, group: Any, world: World) -> None:
        self._engine = engine
        self._group = group
        self._world = world
        self._flats: dict[tuple[str, int], torch.Tensor] = {}

    def run(self) -> None:
        while not self._engine.closed:
            job = self._engine.pull(1.0)
            if job is None:
                continue
            begun = perf_counter()
            try:
                lanes, weight_sum = getattr(self, job.kind)(job)
            except Exception as error:  # noqa: BLE001 (whatever the library raises belongs to the operation)
                job.fail(f"{job.name}: {type(error).__name__}: {error}")
                return
            job.finish(lanes, weight_sum, perf_counter() - begun, 0.0)

    def allreduce(self, job: _core.Job) -> tuple[list[bytes], float]:
        """Sum of the weighted tensors; behind them every rank's lane in a place of its own, zeros from the others."""
        layout = job.layout
        assert layout is not None
        lane = _HEADER.pack(zlib.crc32(job.name.encode()), job.weight) + job.lane
        flat = self._flat(layout, layout.total + len(lane) * self._world.world_size)
        tail = flat[layout.total :].view(self._world.world_size, len(lane))
        tail.zero_()
        # Bytes are whole numbers up to 255: exact in every dtype.
        tail[self._world.rank] = torch.frombuffer(bytearray(lane), dtype=torch.uint8).to(flat.dtype)
        job.pack(flat.data_ptr())
        self._group.allreduce([flat]).wait()
        lanes = [bytes(row) for row in tail.to(torch.uint8).tolist()]
        headers = [_HEADER.unpack_from(data) for data in lanes]
        for rank, (crc, _) in enumerate(headers):
            if crc != headers[self._world.rank][0]:
                raise Mismatch(f"rank {rank} is in another operation: the ranks do not run the same steps")
        total = sum(weight for _, weight in headers)
        job.unpack(flat.data_ptr(), 1.0 / (total or self._world.world_size))
        return [data[_HEADER.size :] for data in lanes], total

    def broadcast(self, job: _core.Job) -> tuple[list[bytes], float]:
        layout = job.layout
        assert layout is not None
        flat = torch.empty(layout.total, dtype=_TORCH[layout.dtype.name])  # once per training: not kept
        if job.root == self._world.rank:
            job.pack(flat.data_ptr())
        options = BroadcastOptions()
        options.rootRank = job.root
        self._group.broadcast([flat], options).wait()
        if job.root != self._world.rank:
            job.unpack(flat.data_ptr(), 1.0)
        return [], 0.0

    def allgather(self, job: _core.Job) -> tuple[list[bytes], float]:
        size = self._world.world_size
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        self._group.allgather([lengths], [torch.tensor([len(job.lane)])]).wait()
        longest = max(int(n) for n in lengths)
        mine = torch.zeros(longest + 4, dtype=torch.uint8)
        data = zlib.crc32(job.name.encode()).to_bytes(4, "little") + job.lane
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(size)]
        self._group.allgather([theirs], [mine]).wait()
        lanes = [bytes(t.numpy().tobytes()[: 4 + int(n)]) for t, n in zip(theirs, lengths, strict=True)]
        for rank, lane in enumerate(lanes):
            if lane[:4] != data[:4]:
                raise Mismatch(f"rank {rank} is in another operation: the ranks do not run the same steps")
        return [lane[4:] for lane in lanes], 0.0

    def _flat(self, layout: _core.Layout, count: int) -> torch.Tensor:
        """A wire buffer, kept: the same few layouts come every step."""
        key = (layout.dtype.name, count)
        if key not in self._flats:
            self._flats[key] = torch.empty(count, dtype=_TORCH[layout.dtype.name])
        return self._flats[key]
