"""One rank of test_compression.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch.distributed import FileStore

from dadt import _core
from dadt.comm.backend.rendezvous import GroupRendezvous
from dadt.comm.bucket import DTYPES, Bucket
from dadt.comm.compression import CODECS, Codec, Feedback, forms
from dadt.comm.compression.base import BLOCK
from dadt.comm.executors import c10d
from dadt.comm.executors.base import Connection
from dadt.comm.executors.device import Device
from dadt.config import Config
from dadt.world import World
from harness.executor_rank import connect
from harness.patience import PATIENCE

COUNTS = ([1], [0], [255], [257], [1000, 0, 33], [40_000, 3])
"""The last one is no small one: it goes in parts. On three ranks and more, some have none of 257."""
STEPS = 6
PRECISION = {"bf16": 2**-7, "fp16": 2**-10, "int8": 1 / 127, "int4": 1 / 7}
"""What two roundings to nearest may change, relative to the greatest value of a block."""


def near(codec: Codec) -> float:
    """How far a mean of normal values may be from the true one."""
    return max(0.2, 5 * PRECISION[codec.core.name])


class Averages:
    """Allreduces of one rank, and what they should have given."""

    def __init__(self, connection: Connection, rank: int, size: int, device: Device | None) -> None:
        self.connection, self.rank, self.size, self.device = connection, rank, size, device
        self.digest = hashlib.sha256()

    def values(self, step: int, counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Of every rank."""
        return [
            torch.randn(sum(counts), dtype=dtype, generator=torch.Generator().manual_seed(100 * step + rank))
            for rank in range(self.size)
        ]

    def mean(self, values: torch.Tensor, counts: list[int], feedback: Feedback, weight: float = 1.0) -> torch.Tensor:
        """Over ranks, as delivered; this rank's are `values`."""
        lane = b"of %d" % self.rank
        flat = torch.full_like(values, torch.nan)
        if self.device is not None:
            coding = (feedback, feedback.keep(None))
            work = self.device.average([values], [flat], flat, coding, name="mean", weight=weight, lane=lane)
        else:
            layout = _core.Layout(DTYPES[values.dtype], counts)
            ends = torch.tensor([0, *counts]).cumsum(0)[:-1].tolist()
            inputs, outputs = ([t.data_ptr() + end * t.element_size() for end in ends] for t in (values, flat))
            arguments = feedback.arguments(layout.total)
            work = self.connection.engine.allreduce(layout, inputs, outputs, "mean", weight, lane, **arguments)
        work.wait(PATIENCE)
        assert work.lanes == [b"of %d" % each for each in range(self.size)]
        self.digest.update(flat.view(torch.uint8).numpy().tobytes())
        return flat

    def stay_near(self, codec: Codec, counts: list[int], dtype: torch.dtype, weights: list[float]) -> None:
        """The error of one step, and that of all: what is lost comes with the next."""
        feedback = Feedback(codec)
        wide = torch.promote_types(dtype, torch.float32)
        true, delivered = torch.zeros(sum(counts), dtype=wide), torch.zeros(sum(counts), dtype=wide)
        most = rounded = 0.0
        for step in range(STEPS):
            every = self.values(step, counts, dtype)
            most = max([most, *(float(v.abs().max()) for v in every if len(v))])
            mean = sum(v.to(wide) * w for v, w in zip(every, weights, strict=True)) / sum(weights)
            got = self.mean(every[self.rank], counts, feedback, weights[self.rank])
            true, delivered = true + mean, delivered + got
            worst = float((delivered - true).abs().max()) if sum(counts) else 0.0
            # What comes is rounded once to the gradient's dtype, in each step anew.
            rounded += 0.0 if dtype == wide else float(got.abs().max()) * torch.finfo(dtype).eps / 2
            bound = 1.3 * most * PRECISION[codec.core.name] + rounded
            assert worst <= bound, (codec.core.name, counts, dtype, step, worst)
        differs = sum(counts) < 2 or not torch.equal(true, delivered)
        assert differs, "nothing was compressed"

    def count(self) -> tuple[int, int]:
        """Bytes sent so far, and what they would be uncompressed."""
        return self.connection.engine.sent if self.device is None else self.device.sent

    def tell_infinity(self, codec: Codec, counts: list[int], dtype: torch.dtype = torch.float32) -> None:
        """One rank has a value that is no number: all see it, and in the next step nobody does."""
        feedback = Feedback(codec)
        for step, bad in enumerate((torch.inf, 0.0, torch.nan, 0.0)):
            every = self.values(step, counts, dtype)
            if bad != 0.0:
                every[0][5] = bad
            got = self.mean(every[self.rank], counts, feedback)
            assert bool(got[5].isfinite()) == (bad == 0.0)
            if bad == 0.0:
                assert (got - sum(every) / self.size).abs().max() < near(codec), "what is owed is poisoned"

    def keep_finite(self, codec: Codec, counts: list[int], dtype: torch.dtype) -> None:
        """Of the greatest numbers, neither the sum nor what rounding adds to the mean becomes infinite."""
        most = torch.finfo(dtype).max if dtype == torch.float16 else 5e37  # their sum fits in float32
        feedback, values = Feedback(codec), torch.full((sum(counts),), most, dtype=dtype)
        values[::3] *= 0.6
        for _ in range(STEPS):
            got = self.mean(values, counts, feedback)
            far = float((got.float() - values.float()).abs().max())
            assert got.isfinite().all() and far <= most * max(0.02, PRECISION[codec.core.name])

    def leave_out(self, codec: Codec, counts: list[int], dtype: torch.dtype = torch.float32) -> None:
        """A rank of weight 0 has no numbers. What was forgotten before that is not owed after."""
        every = self.values(0, counts, dtype)
        mine = torch.full_like(every[0], torch.nan) if self.rank == 1 else every[self.rank]
        got = self.mean(mine, counts, Feedback(codec), float(self.rank != 1))
        mean = (sum(every) - every[1]) / (self.size - 1)
        assert (got - mean).abs().max() < near(codec)
        used, fresh = Feedback(codec), Feedback(codec)
        self.mean(every[self.rank], counts, used)
        used.forget()
        after = []
        for feedback in (used, fresh):
            self.mean(mine, counts, feedback, float(self.rank != 1))
            after.append(self.mean(every[self.rank], counts, feedback))
        assert torch.equal(*after)

    def forget(self, codec: Codec, counts: list[int]) -> None:
        """The same as from the beginning."""
        every = self.values(0, counts, torch.float32)
        feedback = Feedback(codec)
        first = self.mean(every[self.rank], counts, feedback)
        second = self.mean(every[self.rank], counts, feedback)
        feedback.forget()
        assert not torch.equal(first, second)
        assert torch.equal(first, self.mean(every[self.rank], counts, feedback))

    def run(self) -> None:
        weights = [1.0 + rank for rank in range(self.size)]
        for codec in CODECS.values():
            for counts in COUNTS:
                if self.device is not None and not sum(counts):
                    continue
                self.stay_near(codec, counts, torch.float32, [1.0] * self.size)
            for dtype in (torch.float16, torch.bfloat16):
                if forms(codec.core.name, [Bucket([torch.empty(1, dtype=dtype)])])[0] is None:
                    continue
                before = self.count()
                for counts in COUNTS[3:]:
                    self.stay_near(codec, counts, dtype, weights)
                self.keep_finite(codec, COUNTS[4], dtype)
                self.tell_infinity(codec, COUNTS[4], dtype)
                self.leave_out(codec, COUNTS[4], dtype)
                sent, plain = (now - then for now, then in zip(self.count(), before, strict=True))
                fewer = BLOCK * dtype.itemsize / codec.core.block_bytes
                assert 0.85 * fewer < plain / sent < fewer, (codec.core.name, dtype, sent, plain)
            for counts in COUNTS[4:]:
                self.stay_near(codec, counts, torch.float64, weights)
                self.tell_infinity(codec, counts)
                self.forget(codec, counts)
                self.leave_out(codec, counts)


def main(executor: str, hosts: str, rank: int, folder: str) -> None:
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
    device = None
    if executor == "nccl's way":  # with Gloo in place of NCCL and the CPU in that of a GPU
        store = FileStore(str(Path(folder) / "group"), world.world_size)
        meet = GroupRendezvous(store, world.rank, world.world_size, PATIENCE)
        group = c10d.join("gloo", meet, world, range(world.world_size), Config(timeout=PATIENCE))
        device = Device(group, connection.engine, torch.device("cpu"), rank, world.world_size)
    averages = Averages(connection, rank, world.world_size, device)
    averages.run()
    sent, plain = averages.count()
    if device is not None:
        device.close(failed=False)
    connection.engine.close(PATIENCE)
    connection.close()
    print(f"right {averages.digest.hexdigest()} {plain / max(sent, 1):.2f}")
