"""Codecs that send small integers with one scale per block, rounded to nearest."""

from __future__ import annotations

import torch

from dadt import _core

_LEAST = 1e-30
"""Blocks whose largest magnitude is below this are sent as zeros, since dividing by their scale would overflow to
infinity."""
_SCALE = 4
"""Bytes of a block's scale, which is one float32."""


class Integers:
    """Scales each block so that its largest magnitude becomes the largest integer: 127 of 8 bits, or 7 of 4 bits. A
    block with an infinity or NaN decodes to NaN."""

    def __init__(self, core: _core.Codec, bits: int) -> None:
        self.core = core
        self._bits = bits

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        magnitude = values.abs().amax(1, keepdim=True)
        # Divide by a tensor, since a GPU would replace division by a constant with multiplication by its reciprocal,
        # which gives different bits.
        largest = torch.full_like(magnitude, 2 ** (self._bits - 1) - 1)
        scale = magnitude / largest
        # The largest magnitude must not decode to infinity, so the scale is reduced by one unit of precision if the
        # product with the largest integer overflows.
        scale = torch.where((scale * largest).isinf(), torch.nextafter(scale, torch.zeros_like(scale)), scale)
        scale = torch.where(magnitude < _LEAST, 0.0, torch.where(magnitude.isfinite(), scale, torch.nan))
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        whole = torch.where(scale > 0, torch.round(values * inverse), 0.0).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), self._pack(whole)], 1)

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        scale = wire[:, :_SCALE].contiguous().view(torch.float32)
        return self._unpack(wire[:, _SCALE:].view(torch.int8)).to(torch.float32) * scale

    def _pack(self, whole: torch.Tensor) -> torch.Tensor:
        if self._bits == 4:
            whole = (whole[:, ::2] & 15) | (whole[:, 1::2] << 4)
        return whole.view(torch.uint8)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        # A right shift of a signed integer keeps its sign.
        return torch.stack([(packed << 4) >> 4, packed >> 4], 2).flatten(1) if self._bits == 4 else packed


INT8 = Integers(_core.Codec.int8, 8)
INT4 = Integers(_core.Codec.int4, 4)
