"""Codec that sends 8-bit integers with one scale per block, rounded to nearest."""

from __future__ import annotations

import torch

from dadt import _core

_LEAST = 1e-30
"""Blocks whose largest magnitude is below this are sent as zeros, since dividing by their scale would overflow to
infinity."""
_SCALE = 4
"""Bytes of a block's scale, which is one float32."""


class Int8:
    """Scales each block so that its largest magnitude becomes 127. A block with an infinity or NaN decodes to NaN."""

    core = _core.Codec.int8

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        most = values.abs().amax(1, keepdim=True)
        # Divides by a tensor, since a GPU would replace division by a constant with multiplication by its reciprocal,
        # which gives different bits.
        scale = most / torch.full_like(most, 127)
        # The largest magnitude must not decode to infinity, so the scale is reduced by one unit of precision if 127
        # times it overflows.
        scale = torch.where((scale * 127).isinf(), torch.nextafter(scale, torch.zeros_like(scale)), scale)
        scale = torch.where(most < _LEAST, 0.0, torch.where(most.isfinite(), scale, torch.nan))
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        whole = torch.where(scale > 0, torch.round(values * inverse), 0.0).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), whole.view(torch.uint8)], 1)

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        scale = wire[:, :_SCALE].contiguous().view(torch.float32)
        return wire[:, _SCALE:].view(torch.int8).to(torch.float32) * scale
