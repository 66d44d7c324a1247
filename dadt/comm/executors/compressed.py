"""Compressed allreduce over executors that move bytes. Each rank sums one part of the values, in float32 and in rank
order, and sends the sum to all ranks. This moves as many bytes as a ring allreduce, but rounds each value twice instead
of at every hop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dadt import _core
from dadt.comm.executors.base import Executor


class Parts(NamedTuple):
    """Division of a compressed buffer's blocks among ranks: all ranks get equally many, in rank order, except the last
    ranks, which may get fewer or none."""

    codec: _core.Codec
    total: int
    """Number of values in all parts together, before padding to whole blocks."""
    ranks: int

    @property
    def blocks(self) -> int:
        return -(-self.total // _core.BLOCK)

    @property
    def each(self) -> int:
        """Number of blocks in one rank's part."""
        return -(-self.blocks // self.ranks)

    @property
    def bytes(self) -> int:
        """Bytes of one rank's compressed part. With a single rank, the padding of the last block is not counted."""
        return self.codec.wire_bytes(self.total) if self.ranks == 1 else self.each * self.codec.block_bytes

    def of(self, rank: int) -> tuple[int, int]:
        """Return the index of the rank's first block, and the index after its last."""
        return min(rank * self.each, self.blocks), min((rank + 1) * self.each, self.blocks)


def spread(
    executor: Executor,
    parts: Parts,
    rank: int,
    every: torch.Tensor,
    addresses: Sequence[int],
    weights: Sequence[float] | None,
    divisor: float,
    owed: int,
    share: float,
) -> None:
    """Sum this rank's part over all ranks' compressed inputs, compress the sum, and gather the parts of all ranks in
    `every`.

    addresses, weights: memory address of each rank's input, and its factor in the sum. divisor: number by which the sum
    is divided. owed: address of this rank's residual (compression error) of all values; 0 if there is none. share:
    inverse of the rank's weight; the sum's rounding error is multiplied by it before it is added to the residual.
    """
    begin, end = parts.of(rank)
    mine = torch.empty(parts.bytes, dtype=torch.uint8, device="cpu")
    if begin < end:
        first, blocks = begin * _core.BLOCK, end - begin
        to = mine.data_ptr()
        _core.combine(parts.codec, addresses, weights, divisor, first, parts.total, blocks, to, owed, share)
    executor.allgather(mine, every)


def allreduce(
    executor: Executor, rank: int, ranks: int, flat: torch.Tensor, codec: _core.Codec, owed: int, keep: float
) -> None:
    """Sum float32 values over ranks in place, compressed by `codec` on the way. owed: address of the residual
    (compression error). keep: factor for the residual."""
    parts = Parts(codec, flat.numel(), ranks)
    wire, received = (torch.empty(parts.bytes * ranks, dtype=torch.uint8, device="cpu") for _ in range(2))
    _core.compress(codec, flat.data_ptr(), parts.total, wire.data_ptr(), owed, keep)
    executor.exchange(torch.split(wire, parts.bytes), torch.split(received, parts.bytes))
    addresses = [received.data_ptr() + each * parts.bytes for each in range(ranks)]
    spread(executor, parts, rank, wire, addresses, None, 1.0, owed, 1.0)
    _core.decompress(codec, wire.data_ptr(), flat.data_ptr(), parts.total)
