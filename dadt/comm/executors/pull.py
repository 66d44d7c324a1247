"""The Python thread that pulls operations from the C++ engine and runs them on a Python executor."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import zlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from dadt import _core
from dadt.comm.bucket import DTYPES
from dadt.comm.compression.half import narrowed
from dadt.comm.executors import extremes
from dadt.comm.executors.base import Compressing, Connection, Executor
from dadt.comm.executors.compressed import Parts, spread
from dadt.errors import Mismatch

_HEADER = struct.Struct("<IId")  # crc32 of what must be equal on all ranks, metadata bytes, weight
_TORCH = {core.name: dtype for dtype, core in reversed(DTYPES.items())}
"""torch dtype for each of the core's dtype names; the core has neither complex numbers nor bools."""
_SMALL = 32 * 1024
"""Size in bytes up to which each rank gathers all ranks' values and reduces them itself, in rank order, which takes one
network round trip instead of two."""
_SHORT = 48
"""In an allgather of bytes, each rank sends this many bytes of its contribution together with their total length."""

Lanes = tuple["Sequence[bytes]", float]
"""Result of an operation: every rank's step metadata (lane), and the sum of the ranks' weights."""


def connect(executor: Executor, rank: int, world_size: int, timeout: float) -> Connection:
    """Return a connection whose C++ engine runs its operations on the executor, in a separate thread."""
    engine = _core.Engine(None, rank, world_size, timeout)
    # A daemon thread, so that a peer that never joins cannot keep this process from exiting.
    thread = threading.Thread(
        target=Puller(engine, executor, rank, world_size).run, name=f"dadt-{executor.name}", daemon=True
    )
    thread.start()

    def close() -> bool:
        if engine.error is not None:
            executor.abort()
        thread.join(5.0)
        return not thread.is_alive() and bool(executor.close())

    return Connection(engine, executor, close, told=False)


def at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over `count` elements of memory at this address, without copying."""
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


class Puller:
    """Runs the C++ engine's operations on a Python executor, one at a time."""

    def __init__(self, engine: _core.Engine, executor: Executor, rank: int, world_size: int) -> None:
        self._engine = engine
        self._executor = executor
        self._rank = rank
        self._world_size = world_size
        self._flats: dict[torch.dtype, torch.Tensor] = {}
        self._wires: dict[str, tuple[torch.Tensor, memoryview, int]] = {}
        self._sent = (0, 0)
        """Bytes that the current operation sends to peers, and bytes that it would send without compression."""

    def run(self) -> None:
        while not self._engine.closed:
            job = self._engine.pull(1.0)
            if job is None:
                continue
            begun = perf_counter()
            self._sent = (0, 0)
            try:
                if job.unsure:
                    self._agree(job)
                lanes, weight_sum = getattr(self, job.kind)(job)
                job.finish(lanes, weight_sum, perf_counter() - begun, 0.0, *self._sent)
            except Mismatch as error:
                job.fail(str(error), mismatch=True)
                return
            except Exception as error:  # noqa: BLE001 (whatever the library raises belongs to the operation)
                job.fail(f"{job.name}: {type(error).__name__}: {error}")
                return

    def allreduce(self, job: _core.Job) -> Lanes:
        """Run an allreduce. The method depends only on what is equal on all ranks, such as the layout, so that all
        ranks choose the same one."""
        layout = job.layout
        assert layout is not None
        size = layout.total * layout.dtype.itemsize
        if job.codec != _core.Codec.none:
            return self._allreduce_compressed(job, layout)
        if size <= _SMALL:
            self._sent = (size * (self._world_size - 1), job.plain * (self._world_size - 1))
            return self._allreduce_small(job, layout)
        self._sent = (_ring(size, self._world_size), _ring(job.plain, self._world_size))
        if job.lane:
            return self._allreduce_with_lanes(job, layout)
        participants = job.participants or self._world_size
        if job.reduction.name == "mean" and layout.dtype.name not in ("float32", "float64"):
            self._mean_in_wider(job, layout, participants)
        else:
            self._allreduce_plain(job, layout, participants)
        return [b""] * self._world_size, float(participants)

    def _allreduce_plain(self, job: _core.Job, layout: _core.Layout, participants: int) -> None:
        dtype = _TORCH[layout.dtype.name]
        reduction = job.reduction.name
        one = len(layout.counts) == 1 and job.outputs[0] != 0
        flat = at(job.outputs[0], layout.total, dtype) if one else self._flat(dtype, layout.total)
        if job.weight == 0:
            flat.fill_(_neutral(reduction, dtype))
        elif not one or job.inputs != job.outputs:
            job.pack(flat.data_ptr())
        extremes.allreduce(self._executor, flat, "sum" if reduction == "mean" else reduction)
        scale = 1.0 / participants if reduction == "mean" else 1.0
        if not one or scale != 1:
            job.unpack(flat.data_ptr(), scale)

    def _mean_in_wider(self, job: _core.Job, layout: _core.Layout, participants: int) -> None:
        """Average in a wider dtype, since a sum may overflow where the mean does not."""
        dtype = _TORCH[layout.dtype.name]
        flat = self._flat(dtype, layout.total)
        job.pack(flat.data_ptr())
        wider = torch.float32 if dtype.is_floating_point else torch.int64
        wide = flat.to(wider)
        self._executor.allreduce(wide, "sum")
        address = wide.data_ptr()
        _core.reduce(DTYPES[wider], job.reduction, address, [address], None, participants, layout.total)
        flat.copy_(wide)
        job.unpack(flat.data_ptr(), 1.0)

    def _allreduce_small(self, job: _core.Job, layout: _core.Layout) -> Lanes:
        """Gather all ranks' values on every rank, which then reduces them itself in rank order."""
        head = self._head(job, f"{layout.counts}")
        data = -(-len(head) // 8) * 8  # a multiple of 8, so that the values behind the header are aligned
        size = data + layout.total * layout.dtype.itemsize
        mine, my_bytes, my_address = self._wire(size, "mine")
        every, all_bytes, address = self._wire(size * self._world_size, "every")
        my_bytes[: len(head)] = head
        job.pack(my_address + data, 1.0)
        self._executor.allgather(mine, every)
        heads = [bytes(all_bytes[start : start + len(head)]) for start in range(0, len(all_bytes), size)]
        weights = self._weights(job, heads)
        additive = job.reduction.name in ("mean", "sum")
        counted, equal, divisor = _counted(weights)
        _core.reduce(
            layout.dtype,
            job.reduction,
            address + data,
            [address + r * size + data for r in counted],
            [weights[r] for r in counted] if additive and not equal else None,
            divisor if job.reduction.name == "mean" else 1.0,
            layout.total,
        )
        job.unpack(address + data, 1.0)
        return [h[_HEADER.size :] for h in heads], sum(weights)

    def _allreduce_compressed(self, job: _core.Job, layout: _core.Layout) -> Lanes:
        """Average compressed values. Small buffers are gathered on every rank; of larger ones, each rank sums one part
        for all ranks. Step metadata travels with the first exchange."""
        size = layout.total * layout.dtype.itemsize
        small = size <= _SMALL or self._world_size == 1
        if not small and isinstance(self._executor, Compressing):
            return self._allreduce_by_executor(job, layout, self._executor)
        ranks = self._world_size
        parts = Parts(job.codec, layout.total, 1 if small else ranks)
        head = self._head(job, f"{layout.counts} as {job.codec.name}")
        data = -(-len(head) // 8) * 8
        one = data + parts.bytes
        room = job.codec.block_bytes  # codecs read and write whole blocks, but padding is not sent
        received, all_bytes, address = self._wire(one * ranks, "every", room)
        mine, my_bytes, my_address = self._wire(one * parts.ranks, "mine", room)
        for part in range(parts.ranks):
            my_bytes[part * one : part * one + len(head)] = head
            job.compress(*parts.of(part), my_address + part * one + data)
        if small:
            self._executor.allgather(mine, received)
        else:
            self._executor.exchange(torch.split(mine, one), torch.split(received, one))
        heads = [bytes(all_bytes[start : start + len(head)]) for start in range(0, len(all_bytes), one)]
        weights = self._weights(job, heads)
        counted, equal, divisor = _counted(weights)
        if job.reduction.name == "sum":
            equal, divisor = equal and weights[0] in (0, 1), 1.0
        addresses = [address + r * one + data for r in counted]
        factors = None if equal else [weights[r] for r in counted]
        if small:
            job.decompress(addresses, factors, divisor)
        else:
            share = divisor / ((0 if equal else job.weight) or 1.0)
            every, _, start = self._wire(parts.bytes * ranks, "mine")
            spread(self._executor, parts, self._rank, every, addresses, factors, divisor, job.owed, share)
            job.decompress([start], None, 1.0)
        plain = (ranks - 1) * job.plain if small else _ring(job.plain, ranks)
        self._sent = ((ranks - 1) * parts.bytes * (1 if small else 2), plain)
        return [h[_HEADER.size :] for h in heads], sum(weights)

    def _allreduce_by_executor(self, job: _core.Job, layout: _core.Layout, executor: Compressing) -> Lanes:
        """Average with an executor that compresses between hosts itself. Step metadata is sent before the values."""
        heads = self._gather(self._head(job, f"{layout.counts} as {job.codec.name}"))
        weights = self._weights(job, heads)
        total = sum(weights)
        mean = job.reduction.name == "mean"
        dtype = _TORCH[layout.dtype.name]
        flat = self._flat(dtype, layout.total)
        # Values are scaled before the sum, since a sum may exceed the range of 16-bit floats where the mean does not.
        factor = (job.weight if total else 1.0) / ((total or self._world_size) if mean else 1.0)
        if dtype.itemsize > 2:
            job.pack(flat.data_ptr(), factor)
            self._sent = executor.allreduce_compressed(flat, job.codec, job.owed, job.keep)
        else:
            job.pack(flat.data_ptr(), float(factor > 0))  # zeros at weight 0: values may be NaN
            wide = self._flat(torch.float32, layout.total).copy_(flat).mul_(factor)
            sent, plain = executor.allreduce_compressed(wide, job.codec, job.owed, job.keep)
            self._sent = (sent, plain * dtype.itemsize // wide.itemsize)
            flat.copy_(narrowed(wide, dtype))
        job.unpack(flat.data_ptr(), 1.0)
        return [h[_HEADER.size :] for h in heads], total

    def _head(self, job: _core.Job, also: str) -> bytes:
        """Return the header that a rank sends beside its values: a checksum of what must be equal on all ranks, its
        weight and its step metadata. also: further text for the checksum."""
        return _HEADER.pack(zlib.crc32(f"{_describe(job)} {also}".encode()), len(job.lane), job.weight) + job.lane

    def _allreduce_with_lanes(self, job: _core.Job, layout: _core.Layout) -> Lanes:
        """Sum the weighted tensors and gather every rank's step metadata in one allreduce. Each rank puts its metadata
        at a place of its own behind the tensors, where all other ranks have zeros."""
        lane = _HEADER.pack(zlib.crc32(job.name.encode()), len(job.lane), job.weight) + job.lane
        behind = len(lane) * self._world_size
        # This choice uses only values that are equal on all ranks; `job.apart` may differ between ranks.
        spread = 0 < job.spread_count <= job.room - behind
        count = job.spread_count if spread else layout.total
        dtype = _TORCH[layout.dtype.name]
        if spread and job.apart:
            flat = at(job.flat, count + behind, dtype)
        else:
            flat = self._flat(dtype, count + behind).zero_() if spread else self._flat(dtype, count + behind)
        tail = flat[count:].view(self._world_size, len(lane))
        tail.zero_()
        # Metadata bytes are integers up to 255, which every dtype represents exactly.
        tail[self._rank] = torch.frombuffer(bytearray(lane), dtype=torch.uint8).to(flat.dtype)
        mean = job.reduction.name == "mean"
        # Divide before the sum, since 16-bit sums may overflow. Wider floats are divided before the sum only by a power
        # of two, which is exact.
        halves = mean and dtype.is_floating_point and self._world_size & (self._world_size - 1) == 0
        before = 1.0 / self._world_size if layout.dtype.itemsize == 2 or halves else 1.0
        job.pack(flat.data_ptr(), before * job.weight, spread)
        self._executor.allreduce(flat, "sum")
        lanes = [bytes(row) for row in tail.to(torch.uint8).tolist()]
        total = sum(self._weights(job, lanes))
        if total == 0:  # if all weights are 0, all ranks count equally: sum again without weights
            job.pack(flat.data_ptr(), before, spread)
            self._executor.allreduce(flat[:count], "sum")
        divisor = (total or self._world_size) if mean else 1.0
        job.unpack(flat.data_ptr(), 1.0 / (divisor * before), spread)
        return [data[_HEADER.size :] for data in lanes], total

    def _agree(self, job: _core.Job) -> None:
        """Compare the ranks' operations before any rank waits for data. Raises Mismatch on all ranks if they differ."""
        head = _HEADER.pack(zlib.crc32(_describe(job).encode()), 0, 0)
        self._weights(job, self._gather(head.ljust(_HEADER.size + _SHORT, b"\0")))

    def _weights(self, job: _core.Job, heads: Sequence[bytes]) -> list[float]:
        """Return the ranks' weights from their headers. Raises Mismatch on all ranks if the headers belong to different
        operations."""
        read = [_HEADER.unpack_from(head) for head in heads]
        if any(head[:2] != read[0][:2] for head in read):
            self._tell_apart(job)
        return [weight for _, _, weight in read]

    def _tell_apart(self, job: _core.Job) -> None:
        """Raise Mismatch that names two different operations. Must run on all ranks; all have seen the difference."""
        own = f"{_describe(job)}, with a lane of {len(job.lane)} bytes" if job.lane else _describe(job)
        texts = [
            text.rstrip(b"\0").decode(errors="replace") for text in self._gather(own.encode()[:400].ljust(400, b"\0"))
        ]
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
        raise Mismatch(f"rank 0 is in {texts[0]}, rank {other} in {texts[other]}: the ranks do not run the same steps")

    def broadcast(self, job: _core.Job) -> Lanes:
        layout = job.layout
        assert layout is not None
        root = job.root == self._rank
        one = len(layout.counts) == 1
        flat = torch.empty(0 if one else layout.total * layout.dtype.itemsize, dtype=torch.uint8, device="cpu")
        if one:
            flat = at(job.outputs[0], layout.total * layout.dtype.itemsize, torch.uint8)
        elif root:
            job.pack(flat.data_ptr())
        self._executor.broadcast(flat, job.root)
        if not one and not root:
            job.unpack(flat.data_ptr(), 1.0)
        return [], 0.0

    def allgather(self, job: _core.Job) -> Lanes:
        """Gather bytes of any length from all ranks: first the lengths, in a message with room for short contents."""
        head = _HEADER.pack(zlib.crc32(job.name.encode()), 0, len(job.lane))
        data = head + job.lane[:_SHORT].ljust(_SHORT, b"\0")
        heads = self._gather(data)
        lengths = [int(length) for length in self._weights(job, heads)]
        lanes = [h[_HEADER.size :] for h in heads]
        if max(lengths) > _SHORT:
            lanes = self._gather(job.lane.ljust(max(lengths), b"\0"))
        return [lane[:n] for lane, n in zip(lanes, lengths, strict=True)], 0.0

    def _gather(self, data: bytes) -> list[bytes]:
        every = torch.empty(len(data) * self._world_size, dtype=torch.uint8, device="cpu")
        self._executor.allgather(torch.frombuffer(bytearray(data), dtype=torch.uint8), every)
        return [bytes(row.numpy().tobytes()) for row in every.view(self._world_size, len(data))]

    def exchange(self, job: _core.Job) -> Lanes:
        """Exchange bytes between all ranks: first all lengths, then the bytes. Raises Mismatch."""
        assert job.layout is not None
        sent = job.layout.counts
        expected = job.receives.counts if job.receives else [-1] * self._world_size
        head = _HEADER.pack(zlib.crc32(job.name.encode()), 0, 0)
        table = struct.Struct(f"<{2 * self._world_size}q")
        heads = self._gather(head + table.pack(*sent, *expected))
        self._weights(job, heads)
        tables = [table.unpack_from(h, len(head)) for h in heads]
        for receiver, row in enumerate(tables):
            for sender, length in enumerate(row[self._world_size :]):
                if length not in (-1, tables[sender][receiver]):
                    raise Mismatch(
                        f"{job.name}: rank {sender} sends {tables[sender][receiver]} bytes to rank {receiver},"
                        f" which expects {length}"
                    )
        lengths = [row[self._rank] for row in tables]
        addresses = job.outputs if job.receives else job.allocate(lengths)
        self._executor.exchange(
            [at(a, n, torch.uint8) for a, n in zip(job.inputs, sent, strict=True)],
            [at(a, n, torch.uint8) for a, n in zip(addresses, lengths, strict=True)],
        )
        return [], 0.0

    def _flat(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return a buffer of `count` elements, which later calls reuse, or a larger one if it is too small."""
        flat = self._flats.get(dtype)
        if flat is None or len(flat) < count:
            flat = self._flats[dtype] = torch.empty(count, dtype=dtype, device="cpu")
        return flat[:count]

    def _wire(self, size: int, which: str, room: int = 0) -> tuple[torch.Tensor, memoryview, int]:
        """Return a reused byte buffer of `size` bytes as tensor, memoryview and address. room: extra bytes behind it,
        whose content does not matter."""
        wire = self._wires.get(which)
        if wire is None or len(wire[0]) < size + room:
            tensor = torch.empty(max(size + room, 2 * _SMALL), dtype=torch.uint8, device="cpu")
            view: Any = tensor.numpy()
            wire = self._wires[which] = (tensor, memoryview(view), tensor.data_ptr())
        tensor, contents, address = wire
        return tensor[:size], contents[:size], address


def _counted(weights: Sequence[float]) -> tuple[list[int], bool, float]:
    """Return the ranks whose values count (all ranks if the weights are equal, otherwise those with a weight above 0),
    whether all weights are equal, and the divisor for the mean."""
    equal = all(weight == weights[0] for weight in weights)
    # Ranks of weight 0 are left out, since their values may be infinite or NaN.
    counted = [rank for rank, weight in enumerate(weights) if equal or weight > 0]
    return counted, equal, float(len(weights)) if equal else sum(weights)


def _ring(size: int, ranks: int) -> int:
    """Return how many bytes each rank sends in a ring allreduce of `size` bytes."""
    return 2 * (ranks - 1) * size // ranks


def _describe(job: _core.Job) -> str:
    layout = job.layout
    text = f'{job.kind} "{job.name}"'
    # lengths of an exchange may differ between ranks, so they are not part of the comparison
    if layout is None or job.kind == "exchange":
        return text
    return f"{text} of {layout.total} {layout.dtype.name}" + (
        f" from rank {job.root}" if job.kind == "broadcast" else ""
    )


def _neutral(reduction: str, dtype: torch.dtype) -> float:
    """Return the neutral element of the reduction, which changes no result."""
    if reduction in ("sum", "mean"):
        return 0
    if reduction == "product":
        return 1
    if dtype.is_floating_point:
        return math.inf if reduction == "min" else -math.inf
    info = torch.iinfo(dtype)
    return info.max if reduction == "min" else info.min
