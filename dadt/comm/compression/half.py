"""Codecs that send 16-bit floats, rounded to nearest. Finite values beyond the format's range are sent as its largest
value."""

from __future__ import annotations

import torch

from dadt import _core


class Short:
    """Codec that sends each value as a 16-bit float: bfloat16 or float16."""

    def __init__(self, core: _core.Codec, dtype: torch.dtype) -> None:
        self.core = core
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        # Only blocks of finite values are clamped; in a block with an infinity or NaN, infinities must not become
        # finite.
        finite = values.isfinite().all(1, keepdim=True)
        limited = torch.where(finite, values.clamp(-self._largest, self._largest), values)
        return limited.to(self._dtype).view(torch.uint8)

    def decode(self, wire: torch.Tensor) -> torch.Tensor:
        return wire.view(self._dtype).to(torch.float32)


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values rounded once to `dtype`. Finite values stay finite, because those out of range become the
    largest finite value."""
    most = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-most, most), values).to(dtype)


BFLOAT16 = Short(_core.Codec.bf16, torch.bfloat16)
FLOAT16 = Short(_core.Codec.fp16, torch.float16)
