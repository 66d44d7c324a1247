"""Whole numbers of 8 bits with one scale for each block, rounded to nearest."""

from __future__ import annotations

import torch

from dadt import _core

_LEAST = 1e-30
"""Blocks of less are sent as zeros: what is divided by their scale would not be finite."""
_SCALE = 4
"""Bytes of a block's scale, a float32."""


class Int8:
    """127 is a block's greatest magnitude. A block with a value that is no number becomes NaN."""

    core = _core.Codec.int8

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        most = values.abs().amax(1, keepdim=True)
        # Not by a number: a GPU would multiply by its reciprocal, which gives other bits.
        scale = most / torch.full_like(most, 127)
        # The greatest must not come back as infinity.
        scale = torch.where((scale * 127).isinf(), torch.nextafter(scale, torch.zeros_like(scale)), scale)
        scale = torch.where(most < _LEAST, 0.0, torch.where(most.isfinite(), scale, torch.nan))
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        whole = torch.where(scale > 0, torch.round(values * inverse), 0.0).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), whole.view(torch.uint8)], 1)

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        scale = wire[:, :_SCALE].contiguous().view(torch.float32)
        return wire[:, _SCALE:].view(torch.int8).to(torch.float32) * scale
