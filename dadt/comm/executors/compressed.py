"""Allreduces of compressed numbers over executors that move bytes: each rank sums a part of all, in float32 and in the
order of ranks, and sends it to all. That moves the bytes of a ring, and rounds twice in place of at each hop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dadt import _core
from dadt.comm.executors.base import Executor


class Parts(NamedTuple):
    """Blocks divided among ranks: equally many each, in the order of ranks; the last ranks may have fewer, or none."""

    codec: _core.Codec
    total: int
    """Number of values in all parts together."""
    ranks: int

    @property
    def blocks(self) -> int:
        return -(-self.total // _core.BLOCK)

    @property
    def each(self) -> int:
        """Blocks of one part."""
        return -(-self.blocks // self.ranks)

    @property
    def bytes(self) -> int:
        """Elements of one part; of the only part, without the padding of its last block."""
        return self.codec.wire_bytes(self.total) if self.ranks == 1 else self.each * self.codec.block_bytes

    def of(self, rank: int) -> tuple[int, int]:
        """The rank's first block, and the one after its last."""
        return min(rank * self.each, self.blocks), min((rank + 1) * self.each, self.blocks)


class Sum(NamedTuple):
    """The result of folding the ranks' parts."""

    addresses: Sequence[int]
    weights: Sequence[float] | None
    divisor: float
    owed: int
    """Address of what this rank owes of all values; 0: nothing."""
    share: float
    """The inverse of the rank's weight. What rounding the sum has lost is multiplied by it before the rank owes it."""


def spread(executor: Executor, parts: Parts, rank: int, sum: Sum, every: torch.Tensor) -> None:
    """Make this rank's part of the sum, and bring all parts together in `every`."""
    begin, end = parts.of(rank)
    mine = torch.empty(parts.bytes, dtype=torch.uint8, device="cpu")
    if begin < end:
        _core.combine(
            parts.codec,
            sum.addresses,
            sum.weights,
            sum.divisor,
            begin * _core.BLOCK,
            parts.total,
            end - begin,
            mine.data_ptr(),
            sum.owed,
            sum.share,
        )
    executor.allgather(mine, every)


def allreduce(
    executor: Executor, rank: int, ranks: int, flat: torch.Tensor, codec: _core.Codec, owed: int, keep: float
) -> None:
    """Sum float32 values over ranks, in place. owed, keep: as for Engine.allreduce."""
    parts = Parts(codec, flat.numel(), ranks)
    wire, received = (torch.empty(parts.bytes * ranks, dtype=torch.uint8, device="cpu") for _ in range(2))
    _core.compress(codec, flat.data_ptr(), parts.total, wire.data_ptr(), owed, keep)
    executor.exchange(torch.split(wire, parts.bytes), torch.split(received, parts.bytes))
    addresses = [received.data_ptr() + each * parts.bytes for each in range(ranks)]
    spread(executor, parts, rank, Sum(addresses, None, 1.0, owed, 1.0), wire)
    _core.decompress(codec, wire.data_ptr(), flat.data_ptr(), parts.total)
