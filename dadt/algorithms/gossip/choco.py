"""Gossip with compressed differences (CHOCO-Gossip, arXiv:1902.00340): the rounding error shrinks as ranks approach
each other.

In CHOCO both ranks of an edge store a public copy of each other's weights. Here both ranks know how each of them moves,
so they move the copies in the same way. Both copies then stay equal to their mean, so the ranks store only one: the
reference r. With d = round(x - r) on each rank,

    x(i) = x(i) + (d(j) - d(i)) / 2,     r = r + (d(i) + d(j)) / 2

and the rounding error of x(i) - r is part of the next difference.
"""

from __future__ import annotations

import torch

from dadt import _core
from dadt.algorithms.gossip.link_state import PlainLinkState, half_way
from dadt.algorithms.gossip.snapshot import Part, WeightSnapshot, grains
from dadt.comm.compression.base import BLOCK, WIDE, Codec

_ALIGNMENT = 64


class Choco(PlainLinkState):
    """Link state that sends rounded differences from a reference that both ranks share. The first message contains the
    unrounded weights, because rounding would move apart ranks whose weights are equal."""

    def __init__(self, name: str, snapshot: WeightSnapshot, codec: Codec) -> None:
        super().__init__(name, snapshot)
        self._codec = codec.core
        self._reference = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._places: list[slice] = []
        """Range of bytes of each part in a message."""
        end = 0
        for part in snapshot.parts:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + (self._wire_bytes(part) if _rounds(part) else part.stop - part.start)
            self._places.append(slice(start, end))
        self._short = end

    @property
    def size(self) -> int:
        return self._short if self.number else super().size

    def say(self, snapshot: WeightSnapshot, message: torch.Tensor) -> int:
        if not self.number:
            return super().say(snapshot, message)
        step = snapshot.step
        for part, place in zip(snapshot.parts, self._places, strict=True):
            to = message[place]
            if not _rounds(part):
                snapshot.read(part, to.view(part.dtype))
                continue
            values = torch.empty(sum(part.sizes), dtype=part.dtype, device="cpu")
            snapshot.read(part, values)
            torch._foreach_sub_(grains(values), grains(part.of(self._reference)))
            if part.dtype != torch.float32:
                values = _narrow(values)
            _core.compress(self._codec, values.data_ptr(), values.numel(), to.data_ptr())
        return step

    def _settle(self, snapshot: WeightSnapshot, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        if not self.number:
            self._begin(snapshot, mine, theirs)
            super()._settle(snapshot, mine, theirs)
            return
        for part, place in zip(snapshot.parts, self._places, strict=True):
            if not _rounds(part):
                snapshot.add(part, half_way(mine[place].view(part.dtype), theirs[place].view(part.dtype)))
                continue
            own, other = self._values(part, mine[place]), self._values(part, theirs[place])
            mean = own.clone()
            torch._foreach_add_(grains(mean), grains(other))
            torch._foreach_mul_(grains(mean), 0.5)
            torch._foreach_add_(grains(part.of(self._reference)), [_known(grain) for grain in grains(mean)])
            snapshot.add(part, half_way(own, other))

    def _begin(self, snapshot: WeightSnapshot, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        self._reference = torch.empty(snapshot.bytes, dtype=torch.uint8, device="cpu")
        for part in snapshot.parts:
            if _rounds(part):
                reference = grains(part.of(self._reference))
                torch._foreach_copy_(reference, grains(part.of(mine)))
                torch._foreach_add_(reference, grains(part.of(theirs)))
                torch._foreach_mul_(reference, 0.5)
                torch._foreach_copy_(reference, [_known(grain) for grain in reference])

    def _wire_bytes(self, part: Part) -> int:
        """Number of bytes of a rounded part in a message. Parts are padded to whole blocks, as the C++ core writes and
        reads only whole blocks."""
        return -(-sum(part.sizes) // BLOCK) * self._codec.block_bytes

    def _values(self, part: Part, wire: torch.Tensor) -> torch.Tensor:
        values = torch.empty(sum(part.sizes), dtype=torch.float32, device="cpu")
        _core.decompress(self._codec, wire.data_ptr(), values.data_ptr(), values.numel())
        return values


def _rounds(part: Part) -> bool:
    return part.dtype in WIDE


def _narrow(values: torch.Tensor) -> torch.Tensor:
    narrow = torch.empty(values.numel(), dtype=torch.float32, device="cpu")
    torch._foreach_copy_(grains(narrow), grains(values))
    return narrow


def _known(values: torch.Tensor) -> torch.Tensor:
    """Return the values with infinity and NaN replaced by 0, so that they do not spoil the reference and all later
    differences."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
