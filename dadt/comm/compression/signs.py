"""Codecs that send one or two bits of each value, its sign and one of two magnitudes, with one scale per block."""

from __future__ import annotations

import torch

from dadt import _core
from dadt.comm.compression.base import BLOCK

_LEAST = 1e-30
"""Blocks whose mean magnitude is below this are sent as zeros."""
_SCALE = 4
"""Bytes of a block's scale, which is one float32: the mean magnitude of its values."""


class Signs:
    """Sends each value as its sign and the block's mean magnitude; with two bits, as its sign and one of two multiples
    of the mean, whichever is nearer. A block with an infinity or NaN decodes to NaN."""

    def __init__(self, core: _core.Codec, bits: int, low: float, cut: float, high: float, most: float) -> None:
        """low, high: the two magnitudes in units of the mean. cut: values above it are sent as `high`. most: largest
        scale, so that `high` times the scale is finite."""
        self.core = core
        self._bits = bits
        self._low, self._cut, self._high, self._most = low, cut, high, most

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        # Halves are added pairwise, in a fixed order, so that CPU and GPU get the same bits.
        sums = values.abs() * (1 / BLOCK)
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        finite = values.isfinite().all(1, keepdim=True)
        scale = torch.where(sums < _LEAST, 0.0, sums.clamp(max=self._most))
        scale = torch.where(finite, scale, torch.nan)
        sent = finite & (scale > 0)
        code = values.signbit()
        if self._bits == 2:
            code = code * 2 + (values.abs() > scale * self._cut)
        return torch.cat([scale.view(torch.uint8), self._pack(torch.where(sent, code, 0).to(torch.uint8))], 1)

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        scale = wire[:, :_SCALE].contiguous().view(torch.float32)
        code = self._unpack(wire[:, _SCALE:])
        magnitude = torch.where((code & 1) > 0, scale * self._high, scale * self._low) if self._bits == 2 else scale
        return torch.where(code >> (self._bits - 1) > 0, -magnitude, magnitude)

    def _pack(self, code: torch.Tensor) -> torch.Tensor:
        each = 8 // self._bits
        parts = code.view(len(code), -1, each) << self._shifts(code)
        packed: torch.Tensor = parts.sum(2, dtype=torch.uint8)
        return packed

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        codes: torch.Tensor = (packed.unsqueeze(2) >> self._shifts(packed)) & (2**self._bits - 1)
        return codes.flatten(1)

    def _shifts(self, beside: torch.Tensor) -> torch.Tensor:
        return torch.arange(0, 8, self._bits, dtype=torch.uint8, device=beside.device)


BITS2 = Signs(_core.Codec.bits2, 2, 0.56750, 1.23025, 1.89250, 1.7e38)
"""Codec with two bits per value, and the magnitudes that are best for normally distributed values (Max 1960, Lloyd
1982)."""
BITS1 = Signs(_core.Codec.bits1, 1, 1.0, 1.0, 1.0, torch.finfo(torch.float32).max)
